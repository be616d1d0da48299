"""Results beside a run are in a file of their own, and trackers have each of them once."""

import itertools
import json
import math

import pytest

from jaxtrain.observe.trackers.results_log import ResultsLog
from jaxtrain.observe.trackers.tracker import About
from tests.observe.trackers.test_tracking import KINDS, Backend, Fake


class Watcher:
    """A process that logs the results that are there, as often as it is started."""

    def __init__(self, folder, kind):
        self.folder, self.kind, self.backend, self.results = folder, kind, Backend(), {}

    def __call__(self, steps, ends=None):
        about = About("r1", "name", "project", self.folder, {}, {})
        log = ResultsLog(about, lambda: [Fake(self.backend, **self.kind)], self.results.get)
        try:
            with log:
                for step in steps:
                    log.add(step)
                if ends:
                    raise ends
        except KeyboardInterrupt:
            pass

    def lines(self):
        return {line["step"]: line["eval_acc"]
                for line in map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())}

    def shown(self, id="r1"):
        return [(line["step"], line.get("eval_acc")) for line in self.backend.runs.get(id, [])]


@pytest.mark.parametrize("kind", KINDS)
def test_each_result_once_over_restarts(tmp_path, kind):
    watch = Watcher(tmp_path, kind)
    watch.results |= {10: {"eval_acc": 0.25}, 20: {"eval_acc": math.nan}}
    watch([10, 20, 10, 20], ends=KeyboardInterrupt)
    watch.results[30] = {"eval_acc": 0.75}
    watch([10, 20, 30, 40])  # 40 has no results
    watch([10, 20, 30])
    assert watch.shown() == [(10, 0.25), (20, None), (30, 0.75)] and watch.backend.runs.keys() == {"r1"}
    assert watch.backend.ended == ["stopped", "finished", "finished"]
    assert watch.lines() == {10: 0.25, 20: None, 30: 0.75} and not (tmp_path / "metrics.rolled_back.jsonl").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("restarted", [False, True])
def test_results_that_are_replaced(tmp_path, kind, restarted):
    """Results are replaced by those of other tasks, or of the same step after a rollback; later ones are void."""
    watch = Watcher(tmp_path, kind)
    watch.results |= {step: {"eval_acc": step / 100} for step in (10, 20, 30)}

    def replaced():
        watch.results[20] = {"eval_acc": 0.9}
        del watch.results[30]
        yield 20
        watch.results[40] = {"eval_acc": 0.95}
        yield 40

    if restarted:
        watch([10, 20, 30])
        watch([10, *replaced()])
    else:
        watch(itertools.chain([10, 20, 30], replaced()))
    right = {10: 0.1, 20: 0.9, 40: 0.95}
    assert watch.lines() == right
    assert watch.shown("r1" if kind.get("forgets") else "r1-2") == list(right.items())


def test_lines_that_are_no_results_any_more_go_and_damaged_ones_are_written_again(tmp_path):
    watch = Watcher(tmp_path, {})
    watch.results |= {step: {"eval_acc": step / 100} for step in (10, 20, 30)}
    watch([10, 20, 30])
    file = tmp_path / "metrics.jsonl"
    file.write_text(file.read_text().replace('"step": 20', '"st\0\0": 20'))
    watch([10, 20, 30])
    assert list(watch.lines()) == [10, 20, 30] and watch.shown() == [(10, 0.1), (20, 0.2), (30, 0.3)]
    watch.results = {30: {"eval_acc": 0.5}}  # asked otherwise, and the checkpoints of other steps are deleted
    watch([30])
    assert watch.lines() == {30: 0.5} and watch.shown("r1-2") == [(30, 0.5)]
