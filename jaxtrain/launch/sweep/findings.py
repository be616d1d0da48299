"""The results of a sweep: its points from best to worst, and how much each key matters."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.errors import UserError
from jaxtrain.launch.sweep import optuna_points
from jaxtrain.launch.sweep.search_space import Range
from jaxtrain.launch.sweep.sweep_file import Sweep
from jaxtrain.launch.sweep.trials import Trial, Tried

_GROUPS = 4
_ENOUGH = 10  # points, for Optuna's measure


def ranked(sweep: Sweep, tried: Sequence[Tried]) -> list[Tried]:
    """Return the points, the best first: complete ones, then those that were stopped by how far they came."""
    order = {"complete": 0, "stopped": 1, "": 2, "failed": 3}

    def place(point: Tried) -> tuple:
        value = value_of(point)
        steps = 0 if point.state == "complete" else -max(trial.curve.steps for trial in point.trials)
        return order[point.state], steps, value is None, (value or 0.0) * sweep.sign, point.number

    return sorted(tried, key=place)


def value_of(point: Tried) -> float | None:
    """Return the mean over the seeds of a complete point, or the newest value of one that was stopped or runs."""
    values = [value for trial in point.trials if (
        value := trial.ended["value"] if trial.ended else trial.curve.at(trial.curve.steps)) is not None]
    return point.value if point.state == "complete" else mean(values) if values else None


def points(sweep: Sweep, tried: Sequence[Tried]) -> Iterator[JsonObject]:
    """Yield the points from the best to the worst, as scripts read them."""
    for point in ranked(sweep, tried):
        ended = [trial.ended["value"] for trial in point.trials if trial.ended]
        yield {"trials": [trial.number for trial in point.trials], "state": point.state or "runs", "keys": point.keys,
               "metric": sweep.metric, "value": value_of(point),
               "deviation": stdev(ended) if point.state == "complete" and len(ended) > 1 else None,
               "steps": max(trial.curve.steps for trial in point.trials), "tokens": _sum(point, "tokens"),
               "seconds": _sum(point, "seconds"), "dollars": _sum(point, "dollars") or None}


def rows(sweep: Sweep, tried: Sequence[Tried]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of points."""
    head = ["trial", "state", sweep.metric, *(["deviation"] if sweep.runs > 1 else []), "steps", "tokens", "time, s",
            *(["cost, $"] if any(_sum(point, "dollars") for point in tried) else []), *sweep.ranges]
    return head, [_row(sweep, point, "cost, $" in head) for point in ranked(sweep, tried)]


def _row(sweep: Sweep, point: Tried, dollars: bool) -> list[str]:
    first, last, value = point.trials[0].number, point.trials[-1].number, value_of(point)
    spread = [f"{stdev(trial.ended['value'] for trial in point.trials if trial.ended):.2g}"
              if point.state == "complete" else ""] if sweep.runs > 1 else []
    return [f"{first}" if first == last else f"{first} to {last}", point.state or "runs",
            "" if value is None else f"{value:.6g}", *spread, f"{max(trial.curve.steps for trial in point.trials):,}",
            f"{_sum(point, 'tokens'):,.0f}", f"{_sum(point, 'seconds'):,.0f}",
            *([f"{_sum(point, 'dollars'):,.2f}"] if dollars else []), *map(text_of, point.keys.values())]


def _sum(point: Tried, what: str) -> float:
    now = {"tokens": Trial.tokens, "seconds": Trial.seconds}  # of one that has not ended
    return sum((trial.ended[what] or 0) if trial.ended else now[what](trial) if what in now else 0
               for trial in point.trials)


def text_of(value: object) -> str:
    """Return a value of a key as text."""
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"


def importance(sweep: Sweep, tried: Sequence[Tried]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table: what share of the differences between points each key explains."""
    done = [point for point in tried if point.state == "complete" and point.value is not None]
    alone = {key: explained([point.keys[key] for point in done], [point.value or 0.0 for point in done], one)
             for key, one in sweep.ranges.items()}
    optuna = _ped_anova(sweep, done)
    names = sorted(alone, key=lambda key: -alone[key])
    return (["key", "explains", *(["PED-ANOVA"] if optuna else [])],
            [[key, f"{alone[key]:.0%}", *([f"{optuna.get(key, 0.0):.0%}"] if optuna else [])] for key in names])


def explained(keys: Sequence[Any], values: Sequence[float], one: Range) -> float:
    """Return the share of the variance of values, by rank, between groups of points with like values of a key.

    A group has one listed value, or a quarter of the points of a range. The share that as many groups of chance would
    explain is taken away.
    """
    places = keys if one.values else [int(_GROUPS * rank / len(keys)) for rank in _ranks(keys)]
    groups: dict[str, list[float]] = {}
    ranks = _ranks(values)
    for place, rank in zip(places, ranks, strict=True):
        groups.setdefault(repr(place), []).append(rank)
    free = len(values) - len(groups)
    total = sum((rank - mean(ranks)) ** 2 for rank in ranks) if ranks else 0.0
    if free < 1 or len(groups) < 2 or not total:
        return 0.0
    within = sum((rank - mean(group)) ** 2 for group in groups.values() for rank in group)
    return max(0.0, 1 - within / total * (len(values) - 1) / free)


def _ranks(values: Sequence[Any]) -> list[float]:
    """Return each value's place from below; equal ones share the mean of theirs."""
    return [sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
            for value in values]


def _ped_anova(sweep: Sweep, done: Sequence[Tried]) -> Mapping[str, float]:
    """Return the shares by Optuna's PED-ANOVA; {}: it is not installed, or there are too few points."""
    if len(done) < _ENOUGH:
        return {}
    try:
        study = optuna_points.study(sweep, done)
    except UserError:
        return {}
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
