"""The messages while a preparation goes on."""

import re

import pytest

from jaxtrain.data.formats.inputs import Piece
from jaxtrain.data.prepare import prepare_progress
from jaxtrain.data.prepare.prepare import Options, prepare
from jaxtrain.data.prepare.prepare_progress import Progress

TASKS = [(Piece("a", "a", "text", 0, size, size),) for size in (10_000_000, 20_000_000, 30_000_000, 40_000_000)]


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(prepare_progress.time, "monotonic", lambda: now[0])
    return now


def test_a_resumed_run_counts_its_own_rate(clock):
    said = []
    told = Progress("tokens", TASKS, range(4), [1, 2, 3], said.append, 2)
    clock[0] += 10
    told.add(2)
    clock[0] += 10
    told.add(1)
    told.add(3)
    assert said == ["tokens: 1 of 4 tasks, 2 of 2 workers busy",
                    "tokens: 2 of 4 tasks, 40.0%, 3.00 MB/s, 2 of 2 workers busy, 0:00:20 left",
                    "tokens: 3 of 4 tasks, 60.0%, 2.50 MB/s, 1 of 2 workers busy, 0:00:16 left",
                    "tokens: 4 of 4 tasks, 100.0%, 4.50 MB/s, 0:00:00 left"]


def test_a_part_counts_its_own_tasks_and_nothing_to_do_says_nothing(clock):
    said = []
    told = Progress("tokens", TASKS, [1, 3], [1], said.append)
    clock[0] += 1
    told.add(1)
    assert said[1] == "tokens: 2 of 2 tasks, 100.0%, 20.00 MB/s, 0:00:00 left"
    Progress("tokens", TASKS, [1, 3], [], lambda line: pytest.fail(line))


@pytest.mark.parametrize(("workers", "told"), [(1, ", 1 of 1 workers busy"), (8, ", 4 of 8 workers busy"),
                                               (lambda do, calls: iter(()), "")])
def test_busy_workers_are_counted_where_they_are_known(workers, told):
    said = []
    Progress("tokens", TASKS, range(4), range(4), said.append, workers)
    assert said == [f"tokens: 0 of 4 tasks{told}"]


@pytest.mark.parametrize("deduplicate", [False, True])
def test_prepare_tells_how_many_workers_are_busy(tmp_path, deduplicate):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "document {n}"}}\n' for n in range(12)))
    said = []
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", Options(task_bytes=100, deduplicate=deduplicate), 2,
            said.append)
    for what in ["duplicates", "tokens"][not deduplicate:]:
        busy = [re.search(r", (\d) of 2 workers busy", line) for line in said if line.startswith(what)]
        assert [found and found[1] for found in busy] == ["2", "2", "1", None]
