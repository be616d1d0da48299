"""The closed form of a start's timeline is what a loop over its steps gives."""

import dataclasses
import random

import pytest

from jaxtrain.simulation.run_durations import Durations
from jaxtrain.simulation.start_timeline import Timeline


def stepped(d: Durations, first: int, every: int, snapshots: int, last: int):
    """Yield, step by step, when it is complete, when the loop goes on after it, and what is booked until then."""
    time, booked = 0.0, dict.fromkeys(("steps", "data_wait", "checkpoint"), 0.0)

    def spend(seconds, category):
        nonlocal time
        time += seconds
        booked[category] += seconds

    spend(d.opening, "checkpoint")
    spend(d.first_wait, "data_wait")
    for step in range(first + 1, last + 1):
        spend(d.data_wait, "data_wait")
        spend(d.step, "steps")
        complete, then = time, dict(booked)
        if every and step % every == 0:
            spend(d.save_blocked, "checkpoint")
            spend(d.save_drag, "steps")
        elif snapshots and step % snapshots == 0:
            spend(d.snapshot_blocked, "steps")
        yield step, complete, time, then


@pytest.mark.parametrize("seed", range(8))
def test_it_is_what_a_loop_gives(seed):
    dice = random.Random(seed)
    d = dataclasses.replace(
        Durations(), save_written=0.0, snapshot_stored=0.0, **{name: dice.choice((0.0, dice.random())) for name in (
            "data_wait", "first_wait", "opening", "save_blocked", "save_drag", "snapshot_blocked")}, step=dice.random())
    first, every, snapshots = dice.randrange(30), dice.choice((0, 1, 7, 12)), dice.choice((0, 1, 3, 5))
    line = Timeline(d, 1.0, first, every, snapshots)
    for step, complete, goes_on, booked in stepped(d, first, every, snapshots, first + 60):
        assert line.completed(step) == pytest.approx(complete)
        assert line.saved(step) == pytest.approx(goes_on)
        position = line.position(complete + 1e-9, first + 60)
        assert position.done == step
        for name, seconds in booked.items():
            assert getattr(position, name) == pytest.approx(seconds, abs=1e-6)
        middle = line.position(line.saved(step) + 0.5 * (d.step + d.data_wait), 10**6)
        assert sum(dataclasses.astuple(middle)[1:]) == pytest.approx(
            line.saved(step) + 0.5 * (d.step + d.data_wait)), "every second is booked once"


def test_a_save_waits_for_the_one_before_it():
    d = dataclasses.replace(Durations(), step=1.0, save_blocked=0.5, save_written=30.0)
    assert Timeline(d, 1.0, 0, 10, 0).save_blocked == pytest.approx(0.5 + 20.0)
    assert Timeline(d, 4.0, 0, 10, 0).save_blocked == pytest.approx(0.5)


def test_a_state_counts_when_it_is_written():
    d = dataclasses.replace(Durations(), step=1.0, save_blocked=0.5, save_written=3.0)
    line = Timeline(d, 1.0, 0, 10, 0)
    for seconds, kept in ((13.0, 0), (13.6, 10), (23.9, 10), (24.1, 20)):
        assert line.durable(line.position(seconds, 10**6), seconds, 10, d.save_written) == kept
