"""Progress is read from whatever metrics.jsonl holds, without waiting for it."""

import pytest

from jaxtrain.launch.supervisor.progress_file import Steps
from tests.odd_files import ODD, WRONG, in_time


@pytest.mark.parametrize("make", [*ODD, *WRONG], ids=lambda make: make.__name__)
def test_whatever_lies_in_its_place_is_no_progress(tmp_path, make):
    make(tmp_path / "metrics.jsonl")
    assert in_time(lambda: Steps(tmp_path / "metrics.jsonl")).newest == 0


@pytest.mark.parametrize("line", ["null", "[1]", '{"step": "4"}', '{"step": null}', "[" * 100_000, '{"st'])
def test_the_last_whole_line_with_a_step_counts(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 3}}\n{line[-50_000:]}\n')
    assert Steps(tmp_path / "metrics.jsonl").newest == 3
