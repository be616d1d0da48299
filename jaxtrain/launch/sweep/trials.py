"""The trials of a sweep on disk: ROOT/trial-0007 is a run's workdir, and its trial.json is all that the sweep knows.

A record is written before its job is submitted, again when the trial goes on after a stop, and when it ended. What a
trial does in between is read from its job and its metrics.jsonl.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import user_json
from jaxtrain.launch.cost import dollars_an_hour
from jaxtrain.launch.sweep.metric_curve import MetricCurve
from jaxtrain.launch.sweep.search_space import Point
from jaxtrain.launch.sweep.sweep_file import Sweep
from jaxtrain.observe.goodput import account, incarnations

RECORD, RESULTS = "trial.json", "results.jsonl"
_FORM = {"trial": int, "keys": dict, "seed": int | None, "length": int, "sampler": dict, "passed": int, "job": int,
         "devices": str, "ended": dict | None}
_KEPT = tuple(_FORM)[1:]


@dataclass
class Trial:
    """One run of a sweep."""

    root: Path
    number: int
    keys: Point
    seed: int | None  # None: the config's own
    length: int  # the steps of the whole run; 0: the config refuses its keys
    curve: MetricCurve
    sampler: dict[str, Any] = field(default_factory=dict)  # what a sampler or a pruner of Optuna keeps of it
    passed: int = 0  # how many rungs it was let through
    job: int = 1  # the number of the job that it is to have, or a later one
    devices: str = ""  # the GPUs of this machine that it runs on
    ended: dict[str, Any] | None = None  # its line of results.jsonl; None: not yet

    @property
    def workdir(self) -> Path:
        """The run's workdir."""
        return workdir_of(self.root, self.number)

    @property
    def state(self) -> str:
        """The outcome of the trial: complete, stopped or failed; "": it has not ended."""
        return self.ended["state"] if self.ended else ""

    def record(self) -> None:
        """Write its record, whole or not at all."""
        self.workdir.mkdir(parents=True, exist_ok=True)
        atomic_files.write_json(self.workdir / RECORD, {"trial": self.number} | {
            name: getattr(self, name) for name in _KEPT})

    def result(self, sweep: Sweep, state: str) -> JsonObject:
        """Return its line of results.jsonl."""
        self.curve.look()
        value = self.curve.at(self.curve.steps)
        finite = value is not None and abs(value) < float("inf")  # false of NaN too
        seconds = self.seconds()
        rate = dollars_an_hour(sweep.job)
        return {"trial": self.number, "workdir": f"{self.workdir}", "state": state if finite or state != "complete"
                else "failed", "keys": self.keys, "seed": sweep.seed_of(self.keys, self.seed),
                "value": value if finite else None, "steps": self.curve.steps,
                "tokens": self.tokens(), "seconds": round(seconds, 3),
                "dollars": round(rate * seconds / 3600, 6) if rate else None}

    def tokens(self) -> int:
        """Return how many tokens it has trained on."""
        return max(self.curve.tokens.values(), default=0)

    def seconds(self) -> float:
        """Return how long its processes have lived."""
        starts = incarnations(self.workdir)
        return account(starts).lived if starts else 0.0


def workdir_of(root: Path, number: int) -> Path:
    """Return the workdir of a trial."""
    return root / f"trial-{number:04}"


def stopped(workdir: Path) -> bool:
    """Return whether a folder is a trial that its sweep has stopped."""
    said = user_json(workdir / RECORD, {"ended": dict | None}, "workdir", "begin another sweep")
    return bool(said and said["ended"] and said["ended"].get("state") == "stopped")


def read(sweep: Sweep, root: Path) -> list[Trial]:
    """Return the trials of a sweep that were begun, in the order of their numbers."""
    found: list[Trial] = []
    while said := user_json(workdir_of(root, len(found)) / RECORD, _FORM, "workdir", "begin another sweep"):
        said["number"], curve = said.pop("trial"), MetricCurve(workdir_of(root, len(found)), sweep.metric)
        found.append(Trial(root, curve=curve, **{name: said[name] for name in ("number", *_KEPT)}))
        curve.look()
    return found


@dataclass(frozen=True)
class Tried:
    """A point of the sweep, and what its trials say of it together."""

    number: int
    keys: Point
    trials: Sequence[Trial]
    state: str  # complete, stopped or failed; "": not all of its trials have ended
    value: float | None  # the mean over its seeds, of a complete one

    @property
    def sampler(self) -> JsonMapping:
        """The data that a sampler of Optuna keeps of it."""
        return self.trials[0].sampler if self.trials else {}


def points_of(trials: Sequence[Trial], runs: int) -> list[Tried]:
    """Return the points that were tried, each with so many runs."""
    found = []
    for first in range(0, len(trials), runs):
        those = trials[first:first + runs]
        states = {trial.state for trial in those} | ({""} if len(those) < runs else set())
        state = next(each for each in ("", "failed", "stopped", "complete") if each in states)
        values = [trial.ended["value"] for trial in those if trial.ended]
        found.append(Tried(first // runs, those[0].keys, those, state, mean(values) if state == "complete" else None))
    return found


def write_results(root: Path, trials: Sequence[Trial]) -> None:
    """Write results.jsonl: a line for each trial that ended."""
    atomic_files.write(root / RESULTS, "".join(json.dumps(trial.ended) + "\n" for trial in trials if trial.ended))
