"""Runs that differ in seeds alone have a mean and an interval; the others are told apart by their keys."""

import numpy as np
import pytest

from jaxtrain.runs.recorded_run import RecordedRun
from jaxtrain.runs.report import run_facts
from jaxtrain.runs.report.run_curves import RunCurves, names
from jaxtrain.runs.report.seed_statistics import differences, groups, interval
from tests.runs.report.recorded import recorded


@pytest.fixture
def runs(tmp_path):
    made = {"a": (0, {}), "b": (0.3, {"train.seed": 1, "checkpoint.every": 7}), "c": (0.6, {"data.seed": 2}),
            "lower": (-0.5, {"optimizer.learning_rate": 1e-4})}
    return [RunCurves(RecordedRun(recorded(tmp_path / name, shift=shift, overrides=keys)), name)
            for name, (shift, keys) in made.items()]


def test_runs_are_grouped_by_experiment(runs):
    (three, one), found = groups(runs), differences(runs)
    assert [[member.name for member in group.runs] for group in (three, one)] == [["a", "b", "c"], ["lower"]]
    assert found == {"optimizer.learning_rate": [0.001, 0.001, 0.001, 0.0001], "train.seed": [0, 1, 0, 0],
                     "data.seed": [0, 0, 2, 0], "checkpoint.every": [500, 7, 500, 500]}
    evaluated = runs[1].run.evaluations["eval_loss"]
    np.testing.assert_array_equal(three.steps, [10, 20, 30])
    np.testing.assert_allclose(three.means, evaluated)
    # Student's t for 95 % and 2 degrees of freedom is 4.302653; the deviation of -0.3, 0, 0.3 is 0.3.
    np.testing.assert_allclose(three.margins, 4.302653 * 0.3 / 3**0.5, rtol=1e-6)
    assert np.isnan(one.margins).all() and np.isnan(interval([1.0]))
    head, rows = run_facts.over_seeds(groups(runs))
    assert [row[:3] for row in rows] == [
        ["a, b, c", "eval_loss at step 30", "3"], ["a, b, c", "best eval_loss", "3"]]
    mean, half = evaluated[-1], 4.302653 * 0.3 / 3**0.5
    assert rows[0][head.index("mean"):] == [f"{mean:.4f}", "0.3000", f"{mean - half:.4f} to {mean + half:.4f}"]
    assert run_facts.over_seeds([one])[1] == [], "one run has no interval"


def test_runs_are_compared_at_one_step_by_one_metric_and_each_pair_of_seeds_counts_once(tmp_path):
    made = {"long": (30, {}), "short": (20, {"train.seed": 1}), "again": (30, {})}
    each = [RunCurves(RecordedRun(recorded(tmp_path / name, steps, keys | {"train.steps": 30})), name)
            for name, (steps, keys) in made.items()]
    rows = run_facts.over_seeds(groups(each))[1]
    assert rows[0][:3] == ["long, short", "eval_loss at step 20", "2"] and rows[0][4] == "0.0000"
    barely = RunCurves(RecordedRun(recorded(tmp_path / "barely", 5, {"train.seed": 2, "train.steps": 30})), "barely")
    rows = run_facts.over_seeds(groups([*each, barely]))[1]
    assert [row[1:3] for row in rows] == [["loss at step 5", "3"], ["best loss", "3"]]


def test_the_best_so_far_comes_first(runs):
    head, rows = run_facts.compared(runs)
    assert [row[1] for row in rows] == ["lower", "a", "b", "c"] and rows[0][head.index("at step")] == "30"


def test_names_are_as_long_as_they_must_be(tmp_path):
    assert names([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert names([tmp_path / "a" / "run", tmp_path / "b" / "other"]) == ["run", "other"]


def test_hours_begin_where_the_run_began(tmp_path):
    """One step of 36 s is a hundredth of an hour; the steps before an adopted checkpoint do not count."""
    workdir = recorded(tmp_path / "run", 10)
    assert RunCurves(RecordedRun(workdir), "run").at([10])["hours"] == pytest.approx([0.1])
    (workdir / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.0, "step_time_s": 36.0}}\n'
                                                   for step in (501, 502)))
    ledger = workdir / "ledger" / "0001.json"
    ledger.write_text(ledger.read_text().replace('"resumed": 0', '"resumed": 500'))
    assert RunCurves(RecordedRun(workdir), "run").at([502])["hours"] == pytest.approx([0.02])
