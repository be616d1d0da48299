"""The curves of a run: what charts there are, and each key of metrics.jsonl over steps, tokens and hours."""

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.files.bounded_files import json_lines
from jaxtrain.redaction import redacted
from jaxtrain.runs.recorded_run import Columns, RecordedRun
from jaxtrain.runs.report import thinning

AXES = {"step": "step", "tokens": "tokens", "hours": "hours of training"}
TAKEN_BACK = "taken back"
# Numbers that every line has unless they are not finite; elsewhere null says that nothing was measured.
_ALWAYS = {"loss", "cross_entropy", "grad_norm", "eval_loss", "eval_loss_ema", "reward"}
_OTHERS = 40  # charts at most of keys that have no chart of their own


@dataclass(frozen=True)
class Chart:
    """A chart: the keys that it shows, if a run has them."""

    name: str
    title: str
    unit: str
    keys: tuple[str, ...]


CHARTS = (
    Chart("loss", "Loss", "nats per token", ("loss", "eval_loss", "eval_loss_ema")),
    Chart("reward", "Reward", "", ("reward",)),
    Chart("answer_tokens", "Length of answers", "tokens", ("answer_tokens",)),
    Chart("turns", "Turns of a conversation", "", ("turns",)),
    Chart("entropy", "Entropy of the policy's predictions", "nats per token", ("entropy",)),
    Chart("kl_sampled", "Divergence from the policy that sampled", "nats per token", ("kl_sampled",)),
    Chart("sampler_mismatch", "Distance of the sampler's log-probabilities from the trainer's", "nats",
          ("sampler_mismatch", "sampler_mismatch_max")),
    Chart("answering", "Time of answers, the environment, rewards, the teacher and weights for a sampler, per step",
          "seconds", ("rollout_s", "environment_s", "sampler_wait_s", "reward_s", "teacher_s", "sync_s",
                      "sampler_load_s")),
    Chart("staleness", "Steps between the weights that answered and the step", "steps", ("staleness",)),
    Chart("grad_norm", "Gradient norm", "", ("grad_norm",)),
    Chart("learning_rate", "Learning rate", "", ("learning_rate",)),
    Chart("throughput", "Throughput", "tokens per second", ("tokens_per_s",)),
    Chart("examples", "Throughput", "examples per second", ("examples_per_s",)),
    Chart("mfu", "Model FLOPs utilization (MFU)", "fraction of peak", ("mfu", "mfu_full")),
    Chart("step_time", "Step time", "seconds", ("step_time_s",)),
    Chart("data_wait", "Time waiting for data, per step", "seconds", ("data_wait_s",)),
    Chart("goodput", "Goodput", "fraction of the run's time", ("goodput",)),
)


@dataclass(frozen=True)
class Curve:
    """One key of a run over its lines that have it."""

    key: str
    values: np.ndarray  # NaN: not finite
    axes: dict[str, np.ndarray]  # by AXES

    def at(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the places of these rows on each axis."""
        return {axis: places[rows] for axis, places in self.axes.items()}


class RunCurves:
    """The curves of one run, as far as it has been read."""

    def __init__(self, run: RecordedRun, name: str):
        """`name`: what the run is called in charts."""
        self.run, self.name = run, name
        self._steps = self._axes(run.steps)

    @property
    def count_of_events(self) -> int:
        """The number of events of the run."""
        return len(self.run.events)

    def _axes(self, lines: Columns) -> dict[str, np.ndarray]:
        """Return where lines of steps are on each axis; a step whose time was not measured counts as the others."""
        step, each = lines["step"], lines["step_time_s"]
        usual = np.nanmedian(each) if np.isfinite(each).any() else 0.0
        known = [one.resumed for one in self.run.account.incarnations if one.resumed is not None
                 ] if self.run.account and len(step) else []
        first = min([*known, step[0]]) if known else 0.0  # a run that adopted a checkpoint did not train up to it
        hours = np.cumsum(np.where(np.isfinite(each), each, usual) * np.diff(step, prepend=first)) / 3600
        return {"step": step, "tokens": lines["tokens"], "hours": hours}

    def curve(self, key: str) -> Curve | None:
        """Return the curve of a key; None: no line has a value of it."""
        lines = next((lines for lines in _sources(self.run) if key in lines), None)
        if lines is None:
            return None
        values, axes = lines[key], self._steps if lines is self.run.steps else self.at(lines["step"])
        if key not in _ALWAYS:
            rows = np.isfinite(values)
            values, axes = values[rows], {axis: places[rows] for axis, places in axes.items()}
        return Curve(key, values, axes) if len(values) else None

    def at(self, steps: Iterable[float]) -> dict[str, np.ndarray]:
        """Return where steps are on each axis."""
        steps = np.asarray([*steps], float)
        known = self._steps["step"]
        return {axis: steps if axis == "step" or not len(known) else np.interp(steps, known, places)
                for axis, places in self._steps.items()}

    def marks(self) -> dict[str, list[int]]:
        """Return the steps at which something happened to the run, by what it was."""
        found: dict[str, list[int]] = {"restart": [], "rollback": [], "spike": []}
        for start in self.run.account.incarnations[1:] if self.run.account else ():
            found["restart"] += [start.resumed] if start.resumed is not None else []
        for event in self.run.events:
            kind = {"skip": "spike"}.get(event["kind"], event["kind"])
            if kind in ("rollback", "spike") and isinstance(step := event.get("step"), int) and abs(step) < 2**53:
                found[kind].append(step)
        once = {kind: set(steps) for kind, steps in found.items()}
        once["spike"] -= once["rollback"]  # whose cause it was
        return {kind: sorted(steps) for kind, steps in once.items() if steps}

    def taken_back(self) -> Curve | None:
        """Return the loss of the steps that a restart or a rollback took back, which other steps replaced."""
        lines = Columns()
        for line in json_lines(self.run.workdir / "metrics.rolled_back.jsonl", {"step": int}):
            if "loss" in line:  # of a step
                lines.add(line)
        if "loss" not in lines:
            return None
        steps = lines["step"]
        again = np.flatnonzero(np.diff(steps) < 0) + 1  # taken back another time: not one curve
        values = np.insert(lines["loss"], again, math.nan)
        return Curve(TAKEN_BACK, values, self.at(np.insert(steps, again, steps[again])))


def names(workdirs: Sequence[Path]) -> list[str]:
    """Return what to call runs: the last parts of their paths, as many as tell them apart."""
    parts = [[part for part in workdir.absolute().parts if part != workdir.anchor] for workdir in workdirs]
    lengths = range(1, max(map(len, parts)) + 1)
    shorter = (["/".join(one[-count:]) for one in parts] for count in lengths)
    return redacted(next((short for short in shorter if len(set(short)) == len(short)),
                         ["/".join(one) for one in parts]))


def charts(runs: Sequence[RunCurves]) -> list[Chart]:
    """Return the charts of which some run has something to show: the usual ones, then all other keys that vary."""
    usual = [chart for chart in CHARTS if any(one.curve(key) for one in runs for key in chart.keys)]
    known = {"step", "tokens", "examples", *(key for chart in CHARTS for key in chart.keys)}
    keys = dict.fromkeys(key for one in runs for lines in _sources(one.run) for key in lines)
    memory = tuple(key for key in keys if "memory" in key)
    found = [Chart("memory", "Memory", "", memory)] if memory else []
    others = [key for key in keys if key not in known.union(memory) and any(_varies(one.curve(key)) for one in runs)]
    # Named by the key, since a page that is renewed finds its charts by name, and others may come before them.
    return usual + found + [Chart(f"other{zlib.crc32(key.encode()):08x}", key, "", (key,)) for key in others[:_OTHERS]]


def _sources(run: RecordedRun) -> tuple[Columns, ...]:
    """Return the lines that a run has: of its evaluations, its steps, and from `jaxtrain evaluate --watch`."""
    return run.evaluations, run.steps, run.results


def _varies(curve: Curve | None) -> bool:
    return curve is not None and len(np.unique(curve.values[thinning.extremes(curve.values, 2)])) > 1
