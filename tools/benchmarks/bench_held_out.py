"""Fit the rates again without each run in turn, predict the run, and say how many lie within the printed interval.

    python -m tools.benchmarks.bench_held_out

The runs are the fitted ones of bench_published.py: what others published, and the whole steps that were measured on one
H200. Of each the record has the seconds that it took and those predicted with today's rates
(jaxtrain/plan/cost/rates.py) for matmuls, attention, memory and communication. The fit multiplies these:
matmuls by a factor for each chip, the rest by one for each platform, all close to 1. Predictions without a run's own
figures give its held-out error; the interval's factors (jaxtrain/plan/cost/interval.py) come from these errors, and a
run is judged by the interval of all others. No accelerator is needed, and nothing is traced or compiled.
"""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import t

from tools.benchmarks import published_predictions

NOISE, TRUST = 0.07, 0.10  # standard deviations, as logarithms: of a run, and of a rate before the fit
WITHIN = 0.8  # of the runs that the interval is to hold
ENOUGH = 10  # runs


@dataclass(frozen=True)
class Run:
    """A run that somebody timed, and what is predicted of it."""

    name: str
    chip: str
    group: str  # of the interval: "cuda", "tpu" or "experts"
    seconds: float
    parts: Mapping[tuple[str, str], float]  # seconds by what has a rate of its own

    def predicted(self, factors: Mapping[tuple[str, str], float]) -> float:
        """Return the seconds of its step if each rate is slower by its factor."""
        return sum(seconds * factors.get(part, 1.0) for part, seconds in self.parts.items())


def runs() -> list[Run]:
    """Return the recorded runs that the rates were fitted to."""
    found = []
    for one in published_predictions.answers():
        if one.row.fitted:
            row, line = one.row, one.line
            parts = {(row.chip if part == "matmul" else line["platform"], part): seconds
                     for part, seconds in line["parts"].items()}
            group = "experts" if line["experts"] else line["platform"]
            found.append(Run(row.name, row.chip, group, row.seconds(line["flops"]), parts))
    return found


def fitted(known: Sequence[Run]) -> dict[tuple[str, str], float]:
    """Return the factor of each rate that suits these runs best; runs far from all others count less."""
    rates = sorted({part for run in known for part in run.parts})

    def misses(logs: np.ndarray) -> np.ndarray:
        factors = dict(zip(rates, np.exp(logs), strict=True))
        return np.array([*(math.log(run.predicted(factors) / run.seconds) / NOISE for run in known), *(logs / TRUST)])

    found = least_squares(misses, np.zeros(len(rates)), loss="soft_l1")
    return dict(zip(rates, map(float, np.exp(found.x)), strict=True))


def held_out(known: Sequence[Run]) -> dict[str, float]:
    """Return for each run the seconds that it took by those predicted without it."""
    return {run.name: run.seconds / run.predicted(fitted([one for one in known if one is not run])) for run in known}


def interval(errors: Sequence[float]) -> tuple[float, float]:
    """Return the factors between which the next run lies with a probability of `WITHIN`, from those of earlier ones.

    From ten runs on these are order statistics; fewer have none that are wide enough, and Student's t is used.
    """
    n = len(errors)
    if n >= ENOUGH:
        ordered, rank = sorted(errors), min(n, math.ceil((n + 1) * (1 + WITHIN) / 2))
        return ordered[n - rank], ordered[rank - 1]
    logs = np.log(errors)
    half = t.ppf((1 + WITHIN) / 2, n - 1) * math.sqrt(1 + 1 / n) * logs.std(ddof=1)
    return math.exp(logs.mean() - half), math.exp(logs.mean() + half)


def main() -> int:
    """Print each run's held-out error and whether it lies within the interval of all others."""
    known = runs()
    errors = held_out(known)
    print("| run | took, by its held-out prediction | interval of the others | within |\n|---|---|---|---|")
    inside: dict[str, list[bool]] = {}
    for run in known:
        others = [errors[one.name] for one in known if one.group == run.group and one is not run]
        low, high = interval(others)
        inside.setdefault(run.group, []).append(low <= errors[run.name] <= high)
        within = "yes" if inside[run.group][-1] else "no"
        print(f"| {run.name} | {errors[run.name]:.3f} | {low:.2f} to {high:.2f} | {within} |")
    for group, found in inside.items():
        mine = [errors[run.name] for run in known if run.group == group]
        low, high = interval(mine)
        away = statistics.median(abs(error - 1) for error in mine)
        print(f"\n{group}: {sum(found)} of {len(found)} held-out runs within ({sum(found) / len(found):.0%}); "
              f"median error {away:.1%}; interval of all {low:.2f} to {high:.2f}")
    wanted = {" ".join(rate): round(factor, 3) for rate, factor in fitted(known).items()}
    print(f"\nfactors of a fit to all runs: {wanted}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
