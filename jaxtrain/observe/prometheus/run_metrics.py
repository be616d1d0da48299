"""The metrics that a process of a run exports, collected on request: a step costs one lock and a few additions."""

import bisect
import math
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.observe import system_metrics
from jaxtrain.observe.device_memory import FIGURES
from jaxtrain.observe.events import Event
from jaxtrain.observe.ledger import Ledger
from jaxtrain.observe.metrics import Record
from jaxtrain.observe.prometheus.metric_table import COMMON, METRICS, Metric, Samples
from jaxtrain.redaction import redacted

BOUNDS = tuple(digit * 10.0 ** power for power in (-3, -2, -1, 0, 1, 2) for digit in (1, 2, 5))  # seconds of a step
PATIENCE_S = 2.0  # for what may not answer: a driver, a network file system
MOST_KEYS = 100  # other numbers of a line that are exported
# Keys of lines that are exported otherwise.
_LINE = {metric.key for metric in METRICS if metric.source == "line"} | {"step", "goodput", "step_time_s", *FIGURES}
_EVENTS = {metric.key for metric in METRICS if metric.source == "events"}
_BETWEEN = ("restart_gap", "idle")  # categories of time in which there is no process
_GPU = re.compile(r"gpu(\d+)_(\w+)")


class RunMetrics:
    """The metrics of this process: a sink of its lines, and a listener to its steps and events."""

    def __init__(self, workdir: str | Path, ledger: Ledger, *, info: Mapping[str, str], constants: Mapping[str, float]):
        """Begin to collect.

        Args:
            workdir: its name is the label `run`, and of its disk the free space is told.
            ledger: tells the last step and where time goes.
            info: the labels of jaxtrain_run_info.
            constants: numbers that do not change, by the keys of the source `run`.
        """
        self._ledger, self._asking = ledger, threading.Lock()
        self._lock = threading.RLock()  # a signal's handler may record an event in the middle of another
        self.run, self.process = redacted(Path(workdir).absolute().name), jax.process_index()
        self._labels = _labels(COMMON, (self.run, f"{self.process}", socket.gethostname()))
        self._constants = {"info": {tuple(info.values()): 1.0}} | _samples(constants)
        self._record: Record = {}  # the newest number under each name
        self._others: dict[str, None] = {}
        self._tokens: tuple[float | None, float] = None, 0.0  # of the newest line; trained on since the first one
        self._last: tuple[int, float] | None = None  # the last step, and the ledger's seconds of steps then
        self._steps, self._time, self._seconds, self._buckets = 0, 0.0, 0.0, [0] * (len(BOUNDS) + 1)
        self._kinds: Counter[str] = Counter()
        self._saved: Event = {}
        self._slow = {"devices": _Patient(_device_memory), "system": _Patient(lambda: system_metrics.read(workdir))}

    # --------------------------------------------------------------------------------------------- told by the run
    def completed(self, step: int) -> None:
        """Note that the devices completed a step, which the ledger has noted already."""
        seconds = self._ledger.reached[1]
        with self._lock:
            if self._last is not None and step == self._last[0] + 1:  # not after a rollback
                took = max(0.0, seconds - self._last[1])
                self._buckets[bisect.bisect_left(BOUNDS, took)] += 1
                self._seconds += took
            self._last, self._steps, self._time = (step, seconds), self._steps + 1, time.time()

    def write(self, record: Record) -> None:
        """Take a line of metrics.jsonl."""
        with self._lock:
            before, done = self._tokens
            now = record.get("tokens")
            if now is not None:  # after a rollback there are fewer
                self._tokens = now, done + max(0.0, now - before if before is not None else 0.0)
            self._record.update(record)
            for key in sorted(record.keys() - _LINE - self._others.keys()):
                if len(self._others) < MOST_KEYS:
                    self._others[key] = None

    def close(self) -> None:
        """Do nothing: a rollback ends the lines of a run, and others follow."""

    def heard(self, event: Event) -> None:
        """Take an event of this process."""
        with self._lock:
            self._kinds[event["kind"]] += 1
            if event["kind"] == "checkpoint":
                self._saved = event

    # -------------------------------------------------------------------------------------------------- the answer
    def text(self) -> str:
        """Return all metrics in Prometheus's text format, as of now."""
        with self._asking:  # one reader at a time
            sources = {"run": self._constants, **self._told(), **self._asked()}
        lines = []
        for metric in METRICS:
            samples = sources[metric.source].get(metric.key)
            if samples and not (metric.first and self.process):
                lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
                lines += [self._line(metric, own, value) for own, value in samples.items()]
        return "\n".join(lines) + "\n"

    def _line(self, metric: Metric, own: tuple[str, ...], value: float) -> str:
        if metric.kind == "histogram":
            part, labels = own[0], _labels(("le",), own[1:])
        else:
            part, labels = "", _labels(metric.labels, own)
        number = value * metric.scale
        text = repr(number) if math.isfinite(number) else "NaN"
        return f"{metric.name}{part}{{{','.join(filter(None, [self._labels, labels]))}}} {text}"

    def _told(self) -> dict[str, Mapping[str, Samples]]:
        """Return what the run told: of its time, steps, lines, events and checkpoints."""
        life = self._ledger.account()
        own = life.incarnations[-1]
        # A rollback makes steps lost work afterwards; a counter cannot take them back.
        spent = {**own.seconds, "step": own.seconds["step"] + own.seconds["lost_work"]}
        lost = spent.pop("lost_work")
        spent = {category: seconds for category, seconds in spent.items() if category not in _BETWEEN}
        ledger = {"began": own.began, "step": own.reached[0], "lost_work": lost, "starts": len(life.incarnations),
                  "seconds": {(category,): seconds for category, seconds in spent.items()}, "failures": life.failures,
                  "goodput_ratio": life.goodput, "ettr_ratio": life.ettr, "remaining_seconds": life.left}
        with self._lock:
            line: dict[str, Any] = {key: math.nan if value is None and key in ("loss", "eval_loss") else value
                                    for key, value in self._record.items()}
            line["others"] = {(key,): math.nan if line[key] is None else float(line[key]) for key in self._others}
            line["tokens_done"] = self._tokens[1] if "tokens" in line else None
            # Known kinds are 0 from the first on: Prometheus sees no increase of a counter that begins at 1.
            events: dict[str, Any] = {key: sum(self._kinds[kind] for kind in key.split()) for key in _EVENTS}
            events["all"] = {(kind,): float(count) for kind, count in sorted(self._kinds.items()) if count}
            checkpoint = {**self._saved, "step": self._saved.get("step", own.resumed)}
            steps = {"count": self._steps, "last": self._time or None,
                     "duration": _histogram(self._buckets, self._seconds)}
        told = {"ledger": ledger, "line": line, "events": events, "checkpoint": checkpoint, "steps": steps}
        return {source: _samples(values) for source, values in told.items()}

    def _asked(self) -> dict[str, Mapping[str, Samples]]:
        """Return what drivers and the system answer in time."""
        found = {name: source.read() for name, source in self._slow.items()}
        gpus: dict[str, dict[tuple[str, ...], float]] = {}
        for name, value in (found["system"] or {}).items():
            if match := _GPU.fullmatch(name):
                gpus.setdefault(match[2], {})[match[1],] = value
        up: Samples = {(name,): float(answer is not None) for name, answer in found.items()}
        return {"devices": found["devices"] or {}, "system": _samples(found["system"] or {}), "gpus": gpus,
                "sources": {"up": up}}


class _Patient:
    """Calls a function on a thread of its own, and goes on without its answer if it takes too long."""

    def __init__(self, function: Callable[[], JsonMapping]):
        self._function = function
        self._thread: threading.Thread | None = None
        self._answer: Mapping[str, Any] | None = None

    def read(self) -> JsonMapping | None:
        """Return the answer; None if there is none in time, or an error. While a call hangs no other one is made."""
        if self._thread is None or not self._thread.is_alive():
            self._answer = None
            self._thread = threading.Thread(target=self._call, name="prometheus-source", daemon=True)
            self._thread.start()
            self._thread.join(PATIENCE_S)
        return None if self._thread.is_alive() else self._answer

    def _call(self) -> None:
        try:
            self._answer = self._function()
        except Exception:  # of a driver: whatever it is, the other metrics are told
            self._answer = None


def _device_memory() -> Mapping[str, Samples]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for device in jax.local_devices():
        for key, value in (device.memory_stats() or {}).items():
            found.setdefault(key, {})[f"{device.id}",] = float(value)
    return found


def _samples(values: JsonMapping) -> dict[str, Samples]:
    """Return plain numbers as samples without labels; None is left out."""
    return {key: value if isinstance(value, Mapping) else {(): float(value)} for key, value in values.items()
            if isinstance(value, Mapping | int | float)}


def _histogram(buckets: list[int], seconds: float) -> Samples:
    count, found = 0, {}
    for bound, more in zip((*BOUNDS, math.inf), buckets, strict=True):
        count += more
        found["_bucket", "+Inf" if bound == math.inf else f"{bound:.15g}"] = float(count)
    return found | {("_sum",): seconds, ("_count",): float(count)}


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    escaped = [value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for value in values]
    return ",".join(f'{name}="{value}"' for name, value in zip(names, escaped, strict=False))
