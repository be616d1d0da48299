"""A sweep as its file describes it: which keys are searched, how, by which metric, for how long.

    config = "configs/gpt.py:tiny"
    workdir = "runs/rates"
    method = "random"

    [keys]
    "optimizer.learning_rate" = {low = 1e-4, high = 1e-2, log = true}

    [budget]
    trials = 20

A TOML file, or a Python file whose `get_sweep()` returns the same as a dict.
"""

import contextlib
import itertools
import math
import runpy
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import Json, JsonMapping, JsonObject
from jaxtrain.config.load import make_config
from jaxtrain.config.schema import Config, TrainConfig
from jaxtrain.errors import UserError, nearest
from jaxtrain.files.bounded_files import Form, misfit
from jaxtrain.launch import mesh_check
from jaxtrain.launch.cost import dollars_an_hour
from jaxtrain.launch.job_spec import JobSpec, spec_of
from jaxtrain.launch.sweep import search_space
from jaxtrain.launch.sweep.search_space import Point, Range

CONFIG = "base_config.json"  # in the sweep's folder: the config as it was when the sweep began
OWN = ("grid", "random")  # methods that need no Optuna
SEEDS = ("train.seed", "data.seed")
MOST = 10_000  # points of a grid or a random search
_CHECKED = 200  # random ones that are tried on the config before the sweep begins; of a grid all are
_SAMPLE = 20  # points at which the ends of a range are tried where a sampler chooses
_NUMBER = int | float
_FORMS = {
    "": {"config": str, "workdir": str, "method?": str | dict, "seed?": int, "seeds?": int | list, "parallel?": int,
         "objective?": dict, "keys": dict, "fixed?": dict, "stop?": dict, "budget?": dict, "job?": dict},
    "objective": {"metric?": str, "goal?": str},
    "budget": {"trials?": int, "tokens?": _NUMBER, "dollars?": _NUMBER, "time?": str},
    "stop": {"first": int, "factor?": int}}
_GOALS = ("minimise", "maximise")


@dataclass(frozen=True)
class Sweep:
    """One sweep."""

    content: Mapping[str, Any]  # as the file has it
    config: str
    workdir: Path
    method: str
    options: Mapping[str, Any]  # of a sampler of Optuna
    seed: int
    seeds: tuple[int, ...]  # of every point; none: the config's own
    parallel: int  # trials at a time
    metric: str
    maximise: bool
    ranges: Mapping[str, Range]
    fixed: Point
    stop: Mapping[str, Any]
    job: JobSpec
    trials: int  # at most; 0: all of the grid, or until something else is spent
    tokens: float  # at most, of all trials together; 0: any number
    dollars: float
    seconds: float
    values: Mapping[str, Any]  # the config's, before what is searched and fixed

    @property
    def runs(self) -> int:
        """Trials of a point."""
        return max(1, len(self.seeds))

    @property
    def sign(self) -> int:
        """The factor for a value such that lower is better."""
        return -1 if self.maximise else 1

    def overrides(self, point: Point, seed: int | None) -> Point:
        """Return the keys of a trial that differ from the config."""
        return {**self.fixed, **point, **({} if seed is None else dict.fromkeys(SEEDS, seed))}

    def seed_of(self, point: Point, seed: int | None) -> int:
        """Return train.seed of a trial."""
        usual = self.values.get("train", {}).get("seed", TrainConfig.seed)
        return int(self.overrides(point, seed).get("train.seed", usual))

    def config_of(self, point: Point, seed: int | None = None) -> Config:
        """Return the config of a trial; a value that it refuses is a UserError."""
        return make_config(dict(self.values), self.overrides(point, seed))

    def refused(self, point: Point) -> UserError | None:
        """Return why the config refuses a point, or its mesh the job's machines; None: nothing is wrong."""
        try:
            mesh_check.check_mesh(self.config_of(point), self.job)
        except UserError as error:
            return error
        return None

    def examples(self) -> Iterator[Point]:
        """Yield some points that the config takes."""
        points = itertools.islice(search_space.random_points(self.ranges, self.seed), _SAMPLE)
        return (point for point in points if not self.refused(point))

    def example(self) -> Point:
        """Return a point that the config takes."""
        return next(self.examples())

    def points(self) -> list[Point]:
        """Return all points of a grid or a random search, at most those within the budget; none for a sampler."""
        if self.method not in OWN:
            return []
        points = search_space.grid(self.ranges) if self.method == "grid" else search_space.random_points(
            self.ranges, self.seed)
        return list(itertools.islice(points, self.trials // self.runs or MOST))


def read_content(path: str | Path) -> JsonObject:
    """Return what the file of a sweep says."""
    file, found = Path(path), None
    try:
        if file.suffix == ".py":
            found = runpy.run_path(str(file)).get("get_sweep", lambda: None)()
        else:
            found = tomllib.loads(file.read_text())
    except UserError:
        raise
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError("SWEEP", f"{path} cannot be read ({error})", "give a TOML file, or a .py") from error
    except Exception as error:  # it is the user's code
        raise UserError("SWEEP", f"{path} raised {type(error).__name__}: {error}", "fix it") from error
    if not isinstance(found, dict):
        raise UserError("SWEEP", f"{path} has no get_sweep() that returns a dict", "see docs/sweep.md")
    return found


def sweep_of(content: JsonMapping, values: JsonMapping) -> Sweep:
    """Return the sweep that a file describes over the values of a config; every mistake is a UserError."""
    check_form(content)
    method = content.get("method", "random")
    options = dict(method) if isinstance(method, dict) else {"name": method}
    objective, budget, seeds = (content.get(key, {}) for key in ("objective", "budget", "seeds"))
    with _inside("job"):
        job = spec_of(content.get("job", {}))
    with _inside("budget"):
        seconds = JobSpec(time=budget.get("time", ""), grace_s=1).seconds
    made = Sweep(
        content, content["config"], Path(content["workdir"]), str(options.pop("name", "")), options,
        content.get("seed", 0), tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds),
        content.get("parallel", 1), objective.get("metric", "eval_loss"), objective.get("goal") == "maximise",
        {key: search_space.range_of(key, said) for key, said in _flat(content["keys"], _is_range)},
        dict(_flat(content.get("fixed", {}), lambda _: False)), content.get("stop", {}), job,
        budget.get("trials", 0), budget.get("tokens", 0), budget.get("dollars", 0), seconds, values)
    _check_numbers(made)
    _check_keys(made)
    _check_values(made)
    return made


def check_form(content: JsonMapping) -> None:
    """Refuse a file that does not describe a sweep."""
    for section, form in _FORMS.items():
        said = content.get(section, {}) if section else content
        if section != "stop" or ("stop" in content and "pruner" not in said):
            _check(section, said, form)


@contextlib.contextmanager
def _inside(section: str) -> Iterator[None]:
    """Name the section in the mistakes of its keys."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{section}.{error.key}", error.reason, error.fix) from error


def _flat(table: JsonMapping, is_value: Callable[[dict], bool], of: str = "") -> Iterator[tuple[str, Json]]:
    """Yield dotted keys and their values, whether a table writes them "a.b" = 1, a.b = 1 or [a]."""
    for key, said in table.items():
        if isinstance(said, dict) and not is_value(said):
            yield from _flat(said, is_value, f"{of}{key}.")
        else:
            yield f"{of}{key}", said


def _is_range(said: dict) -> bool:
    return any(name in said for name in search_space.FIELDS)


def _check(section: str, said: Json, form: Mapping[str, Form]) -> None:
    """Refuse a key that a section does not know, or one of another type."""
    known = [name.removesuffix("?") for name in form]
    if isinstance(said, dict) and (unknown := next((name for name in said if name not in known), None)):
        home = "" if section else next((name for name, keys in _FORMS.items() if f"{unknown}?" in keys), "")
        raise UserError(f"{section}.{unknown}".lstrip("."), "a sweep has no such key",
                        f"write it below [{home}]" if home else nearest(unknown, known))
    if wrong := misfit(said, dict(form), section):
        key, _, rest = wrong.partition(" ")
        raise UserError("SWEEP" if key == "it" else key, rest, "see docs/sweep.md")


def _check_numbers(sweep: Sweep) -> None:
    goal, seeds = sweep.content.get("objective", {}).get("goal", _GOALS[0]), sweep.content.get("seeds", 1)
    if goal not in _GOALS:
        raise UserError("objective.goal", f"{goal!r} is neither minimise nor maximise", "write one of them")
    if sweep.parallel < 1:
        raise UserError("parallel", f"{sweep.parallel} is not a valid number of trials at a time", "give 1 or more")
    if seeds in (0, []) or (isinstance(seeds, int) and seeds < 1) or any(
            type(seed) is not int for seed in sweep.seeds) or len({*sweep.seeds}) < len(sweep.seeds):
        raise UserError("seeds", f"{seeds} are not different seeds", "give how many, or a list of whole numbers")
    for key in ("trials", "tokens", "dollars"):
        if key in sweep.content.get("budget", {}) and not getattr(sweep, key) > 0:
            raise UserError(f"budget.{key}", f"{getattr(sweep, key)} is spent already", "give more than 0")
    if sweep.trials % sweep.runs:
        raise UserError("budget.trials", f"{sweep.trials} trials do not give every point {sweep.runs} seeds",
                        f"give a multiple of {sweep.runs}")
    if wide := next((key for key, one in sweep.ranges.items() if sweep.method == "grid" and not one.values), None):
        raise UserError(f"keys.{wide}", "a grid needs values", 'list them, or set method="random"')
    if not (sweep.trials or sweep.tokens or sweep.dollars or sweep.seconds or search_space.size(sweep.ranges) < MOST):
        raise UserError("budget", "nothing ends the sweep", "set budget.trials, or tokens, dollars or time")
    if sweep.dollars and not dollars_an_hour(sweep.job):
        raise UserError("budget.dollars", "the price of the trials' machines is not known",
                        "set job.accelerator and job.accelerators_per_node, or leave it out")
    if sweep.stop and sweep.runs > 1:
        raise UserError("stop", "if one seed of a point is stopped, the point has no mean over its seeds",
                        "leave seeds out, and repeat the best points with several")
    for key, least in (("first", 1), ("factor", 2)):
        if key in sweep.stop and "pruner" not in sweep.stop and sweep.stop[key] < least:
            raise UserError(f"stop.{key}", f"{sweep.stop[key]} is too few", f"give {least} or more")


def _check_keys(sweep: Sweep) -> None:
    if not sweep.ranges:
        raise UserError("keys", "nothing is searched", 'give one, such as "optimizer.learning_rate" = [1e-3, 1e-2]')
    if both := next((key for key in sweep.ranges if key in sweep.fixed), None):
        raise UserError(f"fixed.{both}", "it is searched too", "leave one of the two out")
    if both := next((key for key in SEEDS if sweep.seeds and {key} & {*sweep.ranges, *sweep.fixed}), None):
        raise UserError(both, "it is set for every trial by seeds", "leave one of the two out")
    if sweep.method in OWN and sweep.options:
        raise UserError(f"method.{next(iter(sweep.options))}", f"{sweep.method} has no options", "leave it out")


def _check_values(sweep: Sweep) -> None:
    """Refuse values that the config refuses, and a metric that its runs do not have."""
    points = sweep.points()[:None if sweep.method == "grid" else _CHECKED] or list(itertools.islice(
        search_space.random_points(sweep.ranges, sweep.seed), _SAMPLE))
    for key, one in sweep.ranges.items():
        error = None if one.values or one.int else sweep.refused({**points[0], key: one.at(1 / math.e)})
        if error and error.key == key and "is not a whole number" in error.reason:
            raise UserError(f"keys.{key}", "it takes whole numbers, and its range has others too",
                            "write int = true in the range")
    for point in points if sweep.method in OWN else []:
        if error := sweep.refused(point):
            raise UserError(error.key, f"{error.reason} (in the point {shown(point)})", error.fix)
    for key, one in sweep.ranges.items() if sweep.method not in OWN else ():
        for value in one.ends():  # it is wrong if it is wrong whatever the other keys are
            errors = [sweep.refused({**point, key: value}) for point in points]
            if all(errors) and (error := errors[0]):
                raise error
    if all(errors := [sweep.refused(point) for point in points]) and errors[0]:
        raise errors[0]
    train = sweep.config_of(sweep.example()).train
    first = sweep.stop.get("first", 0)
    needs = {"eval_": ("train.eval_every", train.eval_every), "eval_loss_ema": ("train.ema_decay", train.ema_decay)}
    for start, (key, value) in needs.items():
        if sweep.metric.startswith(start) and not value:
            raise UserError("objective.metric", f"runs have no {sweep.metric} with {key}={value}",
                            f"set {key} under fixed, or take another such as loss")
    if train.epochs:
        raise UserError("train.epochs", "the length of a trial is given in steps", "give train.steps under fixed")
    if first >= train.steps:
        raise UserError("stop.first", f"a trial has {train.steps} steps", "give fewer")
    key = "eval_every" if sweep.metric.startswith("eval_") else "log_every"
    if "first" in sweep.stop and (every := getattr(train, key)) > first:
        raise UserError("stop.first", f"no trial has {sweep.metric} before step {every}",
                        f"give that many, or a smaller train.{key} under fixed")


def shown(point: JsonMapping) -> str:
    """Return a point as text."""
    return " ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                    for key, value in point.items())
