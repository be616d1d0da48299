"""The bugs of `tools/release/mutants.py` still fit the code; whether the tests notice them takes hours to find out."""

import pytest

from tools.release.mutants import MUTANTS, ROOT


@pytest.mark.parametrize("name", MUTANTS)
def test_the_text_that_it_replaces_stands_once(name):
    mutant = MUTANTS[name]
    assert (ROOT / "jaxtrain" / mutant.file).read_text().count(mutant.old) == 1
    assert all((ROOT / path).exists() for path in mutant.likely)
