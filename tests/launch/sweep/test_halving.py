"""Asynchronous successive halving, against the published algorithm over a table of curves."""

import heapq
import random

from jaxtrain.launch.sweep.halving import promotable, rungs
from tests.launch.sweep.plain_halving import FACTOR, RUNGS, STEPS, published

TRIALS = 60


def table(seed: int) -> list[dict[int, float]]:
    """Return the values of each trial at each rung and at its end; the order of trials changes along the way."""
    chance = random.Random(seed)
    finals = [chance.random() for _ in range(TRIALS)]
    return [{step: final + chance.gauss(0, 1) / step for step in (*RUNGS, STEPS)} for final in finals]


def ours(curves, workers: int) -> list[tuple[int, int]]:
    """The same workers, asking `promotable`, which keeps nothing."""
    reports: list[dict[int, float]] = [{} for _ in RUNGS]
    passed: dict[int, int] = {}
    steps, jobs, free, clock, taken = [*RUNGS, STEPS], [], workers, 0, []
    while True:
        while free:
            if chosen := promotable(reports, passed, FACTOR):
                trial, k = chosen[0], chosen[1] + 1
                passed[trial] = k
            elif len(passed) < TRIALS:
                trial, k = len(passed), 0
                passed[trial] = 0
            else:
                break
            free -= 1
            taken.append((trial, k))
            heapq.heappush(jobs, (clock + steps[k] - (steps[k - 1] if k else 0), trial, k))
        if not jobs:
            return taken
        clock, trial, k = heapq.heappop(jobs)
        if k < len(RUNGS):
            reports[k][trial] = curves[trial][steps[k]]
        free += 1


def test_rungs():
    assert rungs(81, 3, 81) == [] and rungs(3, 3, 81) == RUNGS and rungs(1, 2, 3) == [1, 2]


def test_it_takes_the_jobs_of_the_published_algorithm():
    for seed in range(8):
        curves = table(seed)
        for workers in (1, 2, 7, 25):
            jobs = ours(curves, workers)
            assert jobs == published(curves, workers)
            assert sum(rung == 0 for _, rung in jobs) == TRIALS and sum(k == 3 for _, k in jobs) in range(1, 10)


def test_a_late_trial_takes_an_early_one_along():
    """A trial that was stopped while it was one of two is among the best third of six."""
    assert promotable([{0: 1.0, 1: 2.0}], {0: 0, 1: 0}, 3) is None
    assert promotable([{0: 1.0, 1: 2.0, 2: 3.0}], dict.fromkeys(range(3), 0), 3) == (0, 0)
    assert promotable([{0: 1.0, 1: 2.0, 2: 3.0}], {0: 1, 1: 0, 2: 0}, 3) is None
    six = {0: 1.0, 1: 2.0, **dict.fromkeys(range(2, 6), 3.0)}
    assert promotable([six], {0: 1, **dict.fromkeys(range(1, 6), 0)}, 3) == (1, 0)


def test_the_highest_rung_comes_first_and_nan_last():
    low = {0: 1.0, 1: 2.0, 2: float("inf")}
    assert promotable([low, {3: 1.0, 4: 2.0, 5: 3.0}], dict.fromkeys(range(6), 0) | {3: 1, 4: 1, 5: 1}, 3) == (3, 1)
    assert promotable([low], {0: 1, 1: 0, 2: 0}, 2) is None
