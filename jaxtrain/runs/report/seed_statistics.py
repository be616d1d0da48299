"""Compare runs: in which keys their configs differ, which are one experiment with other seeds, and how these vary."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.runs.report.run_curves import RunCurves

_SEEDS = ("train.seed", "data.seed")
_WATCHED = ("observe.", "checkpoint.", "resilience.")  # how a run is kept and watched makes no other experiment


@dataclass(frozen=True)
class Group:
    """Runs whose configs differ in seeds alone, and their evaluations at the steps that all of them have."""

    name: str
    runs: Sequence[RunCurves]
    steps: np.ndarray
    means: np.ndarray
    margins: np.ndarray  # half of the 95 % interval by Student's t; NaN for one run


def flat(config: dict[str, JsonObject]) -> JsonObject:
    """Return the values of a config by dotted key."""
    return {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}


def differences(runs: Sequence[RunCurves]) -> dict[str, list[Json]]:
    """Return the keys in which the configs of runs differ, with the value of each run; None: it has no such key."""
    configs = [flat(one.run.config) for one in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    values = {key: [config.get(key) for config in configs] for key in keys}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each)}


def groups(runs: Sequence[RunCurves]) -> list[Group]:
    """Return the runs by experiment, in the order of their first runs.

    Of runs that have their seeds in common too, only the first counts: repeating one says nothing of how seeds vary.
    """
    found: dict[str, dict[str, RunCurves]] = defaultdict(dict)
    for one in runs:
        config = flat(one.run.config)
        keys = {key: value for key, value in config.items() if key not in _SEEDS and not key.startswith(_WATCHED)}
        found[json.dumps(keys, sort_keys=True)].setdefault(json.dumps([config.get(key) for key in _SEEDS]), one)
    return [_group([*members.values()]) for members in found.values()]


def _group(runs: Sequence[RunCurves]) -> Group:
    curves = [dict(zip(steps.tolist(), values.tolist(), strict=True)) for one in runs
              for steps, values in [(one.run.evaluations["step"], one.run.evaluations["eval_loss"])]]
    shared = np.array(sorted(set.intersection(*map(set, curves))))
    each = np.array([[curve[step] for step in shared] for curve in curves])
    finite = np.isfinite(each).all(0)
    shared, each = shared[finite], each[:, finite]
    name = runs[0].name if len(runs) == 1 else f"{runs[0].name} and {len(runs) - 1} more"
    return Group(name, runs, shared, each.mean(0), np.array([interval(column) for column in each.T]))


def interval(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean by Student's t; NaN for fewer than two values."""
    from scipy.special import stdtrit

    n = len(values)
    return float(stdtrit(n - 1, 0.975) * stdev(values) / n**0.5) if n > 1 else float("nan")


def best(one: RunCurves, key: str = "") -> tuple[str, float, int] | None:
    """Return the metric by which runs are ranked, its best value so far and the step; None: there is no finite one.

    `key`: another metric.
    """
    curve = one.curve(key) if key else one.curve("eval_loss") or one.curve("loss")
    if curve is None or not np.isfinite(curve.values).any():
        return None
    place = int(np.nanargmin(curve.values))
    return curve.key, float(curve.values[place]), int(curve.axes["step"][place])


def metric(runs: Sequence[RunCurves]) -> str:
    """Return the metric that runs have in common."""
    return "eval_loss" if all(one.curve("eval_loss") for one in runs) else "loss"


def together(runs: Sequence[RunCurves]) -> tuple[int, list[float]] | None:
    """Return the newest step at which all runs have a finite value of their metric, and the values; None: none."""
    curves = [one.curve(metric(runs)) for one in runs]
    known = [dict(zip(curve.axes["step"][there].tolist(), curve.values[there].tolist(), strict=True))
             for curve in curves if curve for there in [np.isfinite(curve.values)]]
    shared = set.intersection(*map(set, known)) if len(known) == len(curves) else set()
    return (int(max(shared)), [values[max(shared)] for values in known]) if shared else None


def statistics(values: Sequence[float | None]) -> tuple[int, float, float, float] | None:
    """Return of values how many are there, their mean, deviation and the half of its 95 % interval; None: below two."""
    there = [value for value in values if value is not None]
    return (len(there), mean(there), stdev(there), interval(there)) if len(there) > 1 else None
