"""The interval of a predicted step comes from held-out errors of runs that were timed, most of which lie within it."""

import math
from pathlib import Path

import pytest

from jaxtrain.config.load import load_config
from jaxtrain.plan.cost.interval import FACTORS, interval
from jaxtrain.plan.estimate import estimate
from jaxtrain.plan.report.table import explained, figures_of
from jaxtrain.plan.targets import TARGETS
from tools.benchmarks import bench_held_out

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def runs():
    return bench_held_out.runs()


@pytest.fixture(scope="module")
def errors(runs):
    return bench_held_out.held_out(runs)


@pytest.mark.parametrize("group", FACTORS)
def test_it_is_that_of_the_held_out_errors_and_holds_four_of_five_of_them(runs, errors, group):
    mine = [errors[run.name] for run in runs if run.group == group]
    least, most = bench_held_out.interval(mine)
    assert FACTORS[group] == (pytest.approx(least, abs=0.015), pytest.approx(most, abs=0.015))
    assert sum(FACTORS[group][0] <= error <= FACTORS[group][1] for error in mine) >= 0.8 * len(mine)


def test_each_measured_step_lies_within_the_interval_without_it(runs, errors):
    """Whole steps of jaxtrain's own on one H200."""
    steps = [run for run in runs if run.name.startswith("jaxtrain ")]
    assert len(steps) == 5
    for run in steps:
        others = [errors[one.name] for one in runs if one.group == run.group and one is not run]
        least, most = bench_held_out.interval(others)
        assert least <= errors[run.name] <= most, run.name


def test_the_rates_are_those_of_the_fit(runs):
    """Within what a rate was trusted before: the fit to all runs moves none by more than 5 %."""
    assert all(abs(factor - 1) < 0.05 for factor in bench_held_out.fitted(runs).values())


def test_a_fit_finds_a_rate_that_was_wrong(runs):
    slower = [bench_held_out.Run(run.name, run.chip, run.group, run.seconds, {
        part: seconds / (1.2 if part == ("h100", "matmul") else 1) for part, seconds in run.parts.items()})
        for run in runs]
    before, after = (bench_held_out.fitted(these)["h100", "matmul"] for these in (runs, slower))
    assert 1.1 < after / before < 1.2


def test_what_no_run_tells_has_none():
    assert interval("cpu", 1.0, 0) is None
    assert interval("tpu", 2.0, 0) == (2 * FACTORS["tpu"][0], 2 * FACTORS["tpu"][1])


def test_that_of_experts_is_wide():
    wide, usual = (math.log(FACTORS[group][1] / FACTORS[group][0]) for group in ("experts", "cuda"))
    assert wide > usual and interval("cuda", 1.0, 8) == interval("tpu", 1.0, 8) == FACTORS["experts"]


def test_a_plan_says_it():
    guess = estimate(load_config(str(ROOT / "configs/gpt.py") + ":tiny", {"mesh.data": 1}), TARGETS["h100"], 1)
    least, most = guess.seconds * FACTORS["cuda"][0], guess.seconds * FACTORS["cuda"][1]
    assert f"{least:.3g} to {most:.3g} s" in explained(guess)
    assert figures_of(guess, 1e9)["seconds_interval"] == (least, most)
