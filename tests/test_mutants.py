"""The bugs of `tools/release/mutants.py` still fit the code; whether the tests notice them takes hours to find out.

So do those of `tools/release/proof_mutants.py`, which `jaxtrain prove` finds in half an hour.
"""

import pytest

from tools.release import proof_mutants
from tools.release.mutants import MUTANTS, ROOT


@pytest.mark.parametrize("name", MUTANTS)
def test_the_text_that_it_replaces_stands_once(name):
    mutant = MUTANTS[name]
    assert (ROOT / "jaxtrain" / mutant.file).read_text().count(mutant.old) == 1
    assert all((ROOT / path).exists() for path in mutant.likely)


@pytest.mark.parametrize("name", proof_mutants.MUTANTS)
def test_the_text_that_a_proof_is_tried_on_stands_once(name):
    mutant = proof_mutants.MUTANTS[name]
    assert (ROOT / "jaxtrain" / mutant.file).read_text().count(mutant.old) == 1 and mutant.new != mutant.old
