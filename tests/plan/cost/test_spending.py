"""The cost of the remaining steps, against runs that are simulated second by second."""

import random
import re

import pytest

from jaxtrain.observe.goodput import Incarnation, account
from jaxtrain.plan.cost import spending

EVERY, PACE, SAVE, START = 50, 2.0, 10.0, 300.0


def start(began: float, resumed: int, reached: int, ended: str, last: int = 10_000) -> Incarnation:
    """A start whose steps take PACE, and whose saves take SAVE."""
    steps = reached - resumed
    seconds = {"init": START - 20, "compile": 15.0, "restore": 5.0, "step": steps * PACE,
               "checkpoint": steps / EVERY * SAVE}
    return Incarnation(began, seconds, ended, resumed, (reached, steps * PACE), last)


def life(*ends: str, last: int = 10_000):
    found, step, clock = [], 0, 0.0
    for ended in ends:
        found.append(start(clock, step, step + 500, ended, last))
        step, clock = step + 500, found[-1].sign
    return account(found)


def dollars(text: str) -> list[float]:
    return [float(one.replace(",", "")) for one in re.findall(r"\$([\d,]+\.\d\d)", text)]


def played(work: float, mtbf: float, stops: float) -> float:
    """The seconds that so much work takes where failures lose work and stops save first; a mean of many plays."""
    chance, total, plays = random.Random(0), 0.0, 60
    for _ in range(plays):
        done = saved = 0.0
        failure, stop = (chance.expovariate(1 / mtbf), chance.expovariate(1 / stops) if stops else float("inf"))
        clock = 0.0
        while done < work:
            clock, done = clock + 1.0, done + 1.0
            if done - saved >= EVERY * PACE:
                clock, saved = clock + SAVE, done
            if clock >= stop:
                clock, saved = clock + SAVE + START, done
                stop = clock + chance.expovariate(1 / stops)
            if clock >= failure:
                done, clock = saved, clock + START
                failure = clock + chance.expovariate(1 / mtbf)
        total += clock
    return total / plays


def test_the_expected_costs_are_those_of_runs_that_are_played_out():
    """A failure an hour, and a spot machine taken back about every 20 minutes, of a run of five hours."""
    one = life(*["stopped"] * 5, "failed", "")
    rate = 36.0  # so that 100 s are a dollar
    said = spending.outlook(one, rate, EVERY, mtbf_hours=1e9)  # then replaced by what is expected here
    assert dollars(said)[0] == pytest.approx(rate / 3600 * 6500 * PACE * (1 + SAVE / EVERY / PACE), rel=1e-3)
    mtbf = 3600.0
    hours = (mtbf * (1 + one.failures) - one.lived) / 3600
    demand, spot = dollars(spending.outlook(one, rate, EVERY, mtbf_hours=hours))
    work, stops = 6500 * PACE, one.lived / 5
    assert demand == pytest.approx(played(work, mtbf, 0) * rate / 3600, rel=0.03)
    assert spot == pytest.approx(played(work, mtbf, stops) * rate / 3600 * spending.SPOT, rel=0.03)


def test_what_cannot_be_told_is_not():
    assert spending.outlook(life("", last=500), 1.0, EVERY) == ""  # no steps to go
    assert spending.outlook(account([start(0, 0, 0, "failed")]), 1.0, EVERY) == ""  # no steps done
    assert "here: not once" in spending.outlook(life("failed", ""), 1.0, EVERY)
    often = account([start(n * 310.0, n, n + 1, "stopped") for n in range(60)])
    assert "without end on spot machines" in spending.outlook(often, 1.0, EVERY)


def test_what_a_run_has_cost():
    one = life("")  # 500 steps, ten saves and a start: 1,400 s
    assert spending.of_run(one, "NVIDIA H100 80GB HBM3", 8) == (
        "the run has cost about $9.33 for 0.39 h at $24.00 an hour")
    assert spending.of_run(one, "cpu", 8) == spending.of_run(one, "TPU v99", 8) == ""
