"""Points and early stopping by Optuna, which keeps nothing: its study is made anew from the trials on disk each time.

So the next point follows from the seed and from the trials that it is shown, whenever the sweep was interrupted. What
samplers keep beside the values of a trial (the generation of a genetic algorithm, say) is in the trial's record.
"""

import inspect
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.errors import UserError, install_extra, nearest
from jaxtrain.files.atomic_files import digest
from jaxtrain.launch.sweep.search_space import Point, Range, random_points
from jaxtrain.launch.sweep.sweep_file import OWN, Sweep
from jaxtrain.launch.sweep.trials import Tried

_ATTEMPTS = 10  # draws of points that were tried before
_STARTUP = 11  # points after which samplers do what they are for
_REPORTS = 100  # values of a trial that a pruner sees, at most
_NOT_OURS = ("Base", "BaseGA", "Grid", "Random", "PartialFixed")  # no samplers, or in jaxtrain itself


def _optuna() -> ModuleType:
    try:
        import optuna
    except ImportError as error:
        raise UserError("method", "optuna is not installed here", install_extra("sweep")) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _made(key: str, kind: str, name: str, options: JsonMapping) -> Any:
    """Return the sampler or pruner of a name; every mistake is a UserError."""
    module = getattr(_optuna(), f"{kind.lower()}s")
    known = {found.removesuffix(kind).lower(): getattr(module, found) for found in module.__all__
             if found.endswith(kind) and found.removesuffix(kind) not in _NOT_OURS}
    if name not in known:
        raise UserError(key, f"there is no {kind.lower()} {name!r}",
                        nearest(name, [*known, *(OWN if kind == "Sampler" else ())]))
    fields = inspect.signature(known[name]).parameters
    if unknown := next((option for option in options if option not in fields), None):
        raise UserError(f"{key}.{unknown}", f"{name} has no such option", nearest(unknown, fields))
    try:
        with warnings.catch_warnings(action="ignore"):  # some are experimental
            return known[name](**options)
    except Exception as error:  # a value that it does not take, or a package that it needs
        raise UserError(key, f"Optuna refuses {name}: {error}", "see the documentation of Optuna") from error


def sampler(sweep: Sweep, seed: int = 0) -> Any:
    """Return the sampler of a sweep."""
    return _made("method", "Sampler", sweep.method, {**sweep.options, "seed": seed} if sweep.method != "bruteforce"
                 else sweep.options)


def check(sweep: Sweep) -> None:
    """Refuse a sampler or a pruner that cannot work here, before anything is submitted."""
    if sweep.method not in OWN:
        points = itertools.islice(random_points(sweep.ranges, sweep.seed), _STARTUP)
        draw(sweep, [Tried(n, point, (), "complete", float(n)) for n, point in enumerate(points)], _STARTUP)
    if "pruner" in sweep.stop:
        pruner(sweep)


def pruner(sweep: Sweep) -> Any:
    """Return the pruner of a sweep."""
    options = dict(sweep.stop)
    return _made("stop", "Pruner", f"{options.pop('pruner')}", options)


def distribution(one: Range) -> Any:
    """Return a range in Optuna's words; of listed values it knows their places in the list."""
    kinds = _optuna().distributions
    if one.values:
        return kinds.CategoricalDistribution(range(len(one.values)))
    kind = kinds.IntDistribution if one.int else kinds.FloatDistribution
    return kind(*one.ends(), log=one.log)


def _params(point: Point, ranges: Mapping[str, Range]) -> JsonObject:
    return {key: ranges[key].values.index(value) if ranges[key].values else value for key, value in point.items()}


def study(sweep: Sweep, tried: Iterable[Tried], **parts: Any) -> Any:
    """Return a study in memory that has seen these points. What failed is told as worse than all others.

    (Optuna's own state for failures would be ignored by samplers, and they would fail there again.)
    """
    optuna = _optuna()
    found = optuna.create_study(study_name="sweep", direction="maximize" if sweep.maximise else "minimize", **parts)
    states = optuna.trial.TrialState
    kinds = {"complete": states.COMPLETE, "stopped": states.PRUNED, "failed": states.PRUNED, "": states.RUNNING}
    for point in tried:
        curve = {} if point.state == "failed" else reports(sweep, point)
        found.add_trial(optuna.trial.create_trial(
            state=kinds[point.state], value=point.value, params=_params(point.keys, sweep.ranges),
            distributions={key: distribution(one) for key, one in sweep.ranges.items()},
            system_attrs=dict(point.sampler.get("trial", {})), intermediate_values=curve))
        for key, value in point.sampler.get("study", {}).items():
            found._storage.set_study_system_attr(found._study_id, key, value)
    return found


def reports(sweep: Sweep, point: Tried) -> dict[int, float]:
    """Return the values of a point's only trial, at the same steps in all trials; {}: it has several."""
    if len(point.trials) != 1 or not sweep.stop:
        return {}
    every = max(1, point.trials[0].length // _REPORTS)
    found = {}
    for step, value in sorted(point.trials[0].curve.values.items()):
        found[-(-step // every) * every] = value
    return found


def draw(sweep: Sweep, tried: Sequence[Tried], number: int) -> tuple[Point, JsonObject] | None:
    """Return the point of a number, and what the sampler keeps of it; None: all points were tried.

    Args:
        tried: the points before it; those whose state is "" are being tried.
    """
    seen = {repr(point.keys) for point in tried}
    for attempt in range(_ATTEMPTS):
        seed = sweep.seed if sweep.method == "qmc" else int(digest([sweep.seed, number, attempt])[:8], 16)
        made = study(sweep, tried, sampler=sampler(sweep, seed))
        try:
            trial = made.ask({key: distribution(one) for key, one in sweep.ranges.items()})
        except ImportError as error:
            raise UserError("method", f"{sweep.method} needs {error.name}", f"pip install {error.name}") from error
        point = {key: one.values[trial.params[key]] if one.values else trial.params[key]
                 for key, one in sweep.ranges.items()}
        if repr(point) not in seen:
            frozen = made.get_trials(deepcopy=False)[-1]
            kept = {"trial": dict(frozen.system_attrs), "study": made._storage.get_study_system_attrs(made._study_id)}
            return point, kept
    fresh = (point for point in random_points(sweep.ranges, sweep.seed) if repr(point) not in seen)
    point = next(fresh, None)
    return None if point is None else (point, {})


def stopped(sweep: Sweep, tried: Sequence[Tried], point: Tried) -> bool:
    """Return whether the pruner stops a point that is being tried, of which its record keeps what the pruner says."""
    optuna, chosen, trial = _optuna(), pruner(sweep), point.trials[0]
    done = trial.sampler.get("reported", 0)
    for step in [step for step in reports(sweep, point) if step > done]:
        made = study(sweep, tried, pruner=chosen)
        frozen = made.get_trials(deepcopy=False)[point.number]
        frozen.intermediate_values = {each: value for each, value in frozen.intermediate_values.items() if each <= step}
        assert frozen.state == optuna.trial.TrialState.RUNNING
        stops = chosen.prune(made, frozen)
        attributes = made._storage.get_trial(frozen._trial_id).system_attrs
        trial.sampler |= {"reported": step, "trial": dict(attributes)}
        if stops:
            return True
    return False
