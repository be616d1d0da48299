"""Simulated ledgers are those of recorded runs that were killed again and again (docs/operations-simulation.md)."""

import dataclasses
from pathlib import Path

import pytest

from jaxtrain.errors import UserError
from jaxtrain.observe.goodput import account, incarnations
from jaxtrain.simulation.replay import replay
from jaxtrain.simulation.run_durations import each_measured, measured

RECORDED = Path(__file__).parents[2] / "docs/measurements/simulation"


@pytest.mark.parametrize("name, kills", [("first", 5), ("second", 6), ("third", 8), ("fourth", 11),
                                         ("fifth", 12)])
def test_with_a_runs_own_durations(name, kills):
    found = replay(RECORDED / name, each_measured(RECORDED / name))
    assert found.failures == kills
    assert found.misplaced < 0.05 and abs(found.ettr[1] - found.measured.ettr) < 0.03
    assert found.rows()[-1][2] == pytest.approx(found.rows()[-1][1], rel=0.05), "the step that it reaches"


@pytest.mark.parametrize("fitted, predicted", [("first", "second"), ("second", "first"), ("fourth", "fifth"),
                                               ("fifth", "fourth")])
def test_with_another_runs_durations(fitted, predicted):
    found = replay(RECORDED / predicted, [measured(RECORDED / fitted)])
    assert found.misplaced < 0.05 and abs(found.ettr[1] - found.measured.ettr) < 0.03


def test_other_rules_have_another_ledger():
    """Starts and saves that take longer are noticed, so what the tests above compare can differ."""
    own = each_measured(RECORDED / "second")
    for name, seconds in (("launch", 30.0), ("save_written", 60.0), ("others_end", 60.0)):
        slower = [dataclasses.replace(one, **{name: seconds}) for one in own]
        if name == "others_end":  # the supervisor's rule: those that live get so many seconds, and are then killed
            assert replay(RECORDED / "second", slower).misplaced < 0.05
        else:
            assert replay(RECORDED / "second", slower).misplaced > 0.05, name


def test_durations_are_means_of_the_ledger():
    starts = incarnations(RECORDED / "third")
    found, life = measured(RECORDED / "third"), account(starts)
    trained = [one for one in starts if one.resumed is not None and one.reached[0] > one.resumed]
    steps = sum(one.reached[0] - one.resumed for one in trained)
    assert found.step * steps == pytest.approx(sum(one.reached[1] for one in trained))
    assert found.data_wait * steps + found.first_wait * len(trained) == pytest.approx(
        sum(one.seconds["data_wait"] for one in trained))
    assert 5 < found.launch < 20 and 0 < found.others_end < 5
    assert len(each_measured(RECORDED / "third")) == 9 and life.failures == 6  # two ended before their ledger began


def test_no_run(tmp_path):
    for call in (lambda: measured(tmp_path), lambda: replay(tmp_path, [])):
        with pytest.raises(UserError, match="give the workdir of a run"):
            call()
