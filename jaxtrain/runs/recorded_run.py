"""Read the folder of a run: its config, metrics, events, time and checkpoints, now and again as they grow."""

import contextlib
import itertools
import math
import sys
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.checkpoint import verify
from jaxtrain.config.sections.earlier_keys import as_named_now
from jaxtrain.distributed import run_processes
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import user_json
from jaxtrain.files.log_tail import LogTail
from jaxtrain.observe import goodput
from jaxtrain.redaction import redacted

SILENT = 30.0  # seconds without a sign of life, which a run gives every five, after which it is taken for dead
_STEPS = 2**53  # floats count up to here; no step is beyond
_TOGETHER = 1000  # lines
_NUMBERS = {int, float, type(None)}
_LARGEST = sys.float_info.max
_FIX = "bring the run's records back"


class Columns:
    """Lines of numbers by key: the value of every line, NaN where it has none or one that is not finite."""

    def __init__(self):
        self._values: dict[str, array] = {}
        self._count = 0  # of lines in these
        self._lines: list[Mapping[str, Any]] = []  # that are not in these yet: many at once are quicker
        self.last: Mapping[str, Any] = {}  # the newest line as it is written

    def add(self, line: JsonMapping) -> None:
        """Add a line; what is not a number is left out."""
        self._lines.append(line)
        self.last = line
        if len(self._lines) >= _TOGETHER:
            self._settle()

    def _settle(self) -> dict[str, array]:
        """Return the columns with every line in them."""
        for keys, lines in itertools.groupby(self._lines, tuple):
            rows = [line.values() for line in lines]
            for key, values in zip(keys, zip(*rows, strict=True), strict=True):
                if (kinds := set(map(type, values))) & _NUMBERS:
                    column = self._values.setdefault(key, array("d"))
                    column.extend([math.nan] * (self._count - len(column)))
                    column.frombytes(_floats(values, kinds <= _NUMBERS).tobytes())
            self._count += len(rows)
        self._lines = []
        return self._values

    def __getitem__(self, key: str) -> np.ndarray:
        column = self._settle().get(key, array("d"))
        return np.concatenate([np.array(column), np.full(self._count - len(column), math.nan)])

    def __contains__(self, key: str) -> bool:
        return key in self._settle()

    def __iter__(self) -> Iterator[str]:
        return iter(self._settle())

    def __len__(self) -> int:
        return self._count + len(self._lines)


def _floats(values: Sequence[Any], numbers: bool) -> np.ndarray:
    """Return values as floats, NaN for None and for what is not a number, or too large; `numbers`: all are numbers."""
    with contextlib.suppress(OverflowError):
        if numbers:
            return np.array(values, float)
    return np.array([value if type(value) in _NUMBERS and abs(value or 0) < _LARGEST else None for value in values],
                    float)


class RecordedRun:
    """A run as its folder tells of it; `look` brings it up to date, and reads only what was added."""

    def __init__(self, workdir: str | Path, last: int | None = None):
        """Read the folder of a run, which has trained, or has begun to.

        `last`: read only the lines of metrics and events within this many bytes of the end; None: all of them.

        Raises:
            UserError: it is not one.
        """
        self.workdir = Path(workdir)
        self._metrics = LogTail(self.workdir / "metrics.jsonl", {"step": int}, last)
        self._events = LogTail(self.workdir / "events.jsonl", {"kind": str}, last)
        self._results = LogTail(self.workdir / "evaluations" / "metrics.jsonl", {"step": int}, last)  # of a watcher
        self._known_events: list[JsonObject] = []
        self.steps, self.evaluations, self.results = Columns(), Columns(), Columns()
        self.look()
        if not self.config:
            raise UserError("WORKDIR", f"{workdir} has no config.json", "give the workdir of a run")

    def look(self) -> None:
        """Read what is new."""
        self._sign: float | None = None  # until it is asked for: processes may have many heartbeats
        self.config: dict[str, dict[str, Any]] = as_named_now(redacted(user_json(
            self.workdir / "config.json", {str: dict}, "WORKDIR", _FIX) or {}))
        self.run: dict[str, Any] = redacted(user_json(self.workdir / "run.json", dict, "WORKDIR", _FIX) or {})
        if self._metrics.shrunk():  # a run that resumes takes lines back
            self.steps, self.evaluations = Columns(), Columns()
        for line in self._metrics.added():
            if abs(line["step"]) < _STEPS:
                (self.evaluations if "eval_loss" in line else self.steps).add(line)
        if self._results.shrunk():
            self.results = Columns()
        for line in self._results.added():
            if abs(line["step"]) < _STEPS:
                self.results.add(line)
        self._events_are_old = True
        starts = goodput.incarnations(self.workdir)
        self.account: goodput.Account | None = goodput.account(starts) if starts else None

    @property
    def events(self) -> list[JsonObject]:
        """The events of the run, in order. They are read when somebody asks, which a list of many runs does not."""
        if self._events_are_old:
            if self._events.shrunk():
                self._known_events = []
            self._known_events += map(redacted, self._events.added())
            self._events_are_old = False
        return self._known_events

    @property
    def last_step(self) -> int:
        """The step at which it ends; 0: it says no number."""
        steps = self.config.get("train", {}).get("steps")
        return steps if isinstance(steps, int) else 0

    @property
    def step(self) -> int:
        """The newest step of metrics.jsonl."""
        return self.steps.last["step"] if len(self.steps) else 0

    @property
    def checkpoints(self) -> list[int]:
        """The steps of its whole checkpoints."""
        return verify.steps(self.workdir / "checkpoints")

    @property
    def sign(self) -> float:
        """The time of its last sign of life, in its ledger or by a heartbeat; 0: it gave none.

        Either may be missing, for example after the disk was full for a while.
        """
        if self._sign is None:
            written = self.account.incarnations[-1].sign if self.account else 0.0
            self._sign = max(written, run_processes.last_beat(self.workdir, written))
        return self._sign

    def state(self, now: float | None = None) -> str:
        """Return "running", "finished", "stopped" (by a signal), "failed", "silent" (killed, or hung) or "new"."""
        newest = self.account.incarnations[-1] if self.account else None
        sign = self.sign
        if newest and newest.ended and sign < newest.sign + SILENT:  # after that, a start without a ledger gave it
            return newest.ended
        if not newest and not sign:
            return "new"
        silent = (time.time() if now is None else now) - sign >= SILENT
        began = newest.began if newest else 0.0
        return "silent" if silent or run_processes.was_killed(self.workdir, began) else "running"
