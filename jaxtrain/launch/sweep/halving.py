"""Asynchronous successive halving (ASHA; Li et al. 2018, "A system for massively parallel hyperparameter tuning").

Trials are compared at rungs: after `first` steps, then after `factor` times as many, and so on. A free worker goes on
with the best trial that is among the best 1/factor of its rung and has not gone on yet, looking at the highest rung
first; only where there is none it begins a new trial. It never waits for a rung to fill.
"""

from collections.abc import Iterable, Mapping, Sequence


def rungs(first: int, factor: int, steps: int) -> list[int]:
    """Return the steps after which trials of this many steps are compared; all that goes on beyond the last is run."""
    found = []
    while first < steps:
        found.append(first)
        first *= factor
    return found


def promotable(reports: Sequence[Mapping[int, float]], passed: Mapping[int, int],
               factor: int) -> tuple[int, int] | None:
    """Return the trial that a free worker goes on with, and the rung at which it stands; None: begin a new one.

    Args:
        reports: for each rung, what the trials that reached it have there; lower is better.
        passed: how many rungs a trial was let through.
        factor: one of this many goes on.
    """
    for rung in reversed(range(len(reports))):
        for trial in best(reports[rung], len(reports[rung]) // factor):
            if passed[trial] <= rung:
                return trial, rung
    return None


def best(values: Mapping[int, float], count: int) -> Iterable[int]:
    """Return so many of the trials, the best first; of equal ones the earlier."""
    return sorted(values, key=lambda trial: (values[trial], trial))[:count]
