"""The metrics writer: reads each step's scalars one step late on its own thread, so that the loop never waits for them.
"""

import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import jax
import numpy as np

from jaxtrain.base.annotations import AnyArray, JsonMapping
from jaxtrain.errors import UserError
from jaxtrain.files.append_log import AppendLog
from jaxtrain.files.bounded_files import appended, lines_with_ends, parsed, whole_lines
from jaxtrain.observe import events
from jaxtrain.observe.device_memory import device_memory
from jaxtrain.observe.flops import mfu

if TYPE_CHECKING:
    from jaxtrain.observe.ledger import Ledger

Record = dict[str, float | int | None]


class Sink(Protocol):
    """A receiver of the lines of metrics.jsonl as they are written, called on the writer's thread."""

    def write(self, record: Record) -> None:
        """Receive the line of a step, or of an evaluation (which has `eval_loss`)."""

    def close(self) -> None:
        """Finish; nothing follows."""


@dataclass(frozen=True)
class Constants:
    """The constants that turn a step and its duration into throughput and utilization."""

    tokens_per_step: int
    flops_per_token: float = 0.0  # causal
    flops_per_token_full: float = 0.0
    peak: float | None = None  # FLOP/s of all devices together; None: unknown, and no mfu is written
    tokens_before: int | None = None  # tokens before this step; None: all steps have equally many
    unit: str = "tokens"  # what is counted: "examples" where a model of the user's own reads no tokens


class MetricsWriter:
    """Writes one JSON object per line to `directory/metrics.jsonl`, every `log_every` steps and at `last_step`.

    A step's line has `step` (completed steps), the step's own device scalars, `tokens` (since step 0), `step_time_s`
    and the host fields (over the steps since the previous line: means of seconds, `..._s`, and the last value of
    others), `tokens_per_s`, `mfu`, `mfu_full`, `goodput`, and the memory of devices that count it. Conventions:

    * Where batches have no tokens, `examples` and `examples_per_s` replace `tokens` and `tokens_per_s`.
    * A number that is not finite is written as null, since JSON cannot represent it: `"loss": null` is a NaN loss.
    * `idle_s` is the part of a step's time before its dispatch began, in which the devices had nothing to do.
    * Step time runs from one step's completion to the next one's. The first step of a process has no predecessor (and
      includes compilation), so it is in no average; a line with only that step has null. Evaluations and what is
      compiled after a step are excluded too: the clock restarts when they end.

    Use it as a context manager: when it ends, all lines are written and the sinks closed.
    """

    def __init__(self, directory: str | Path, *, start_step: int, last_step: int,
                 constants: Constants | Callable[[int], Constants], log_every: int = 1, max_lag: int = 2,
                 sinks: Sequence[Sink] = (), completed: Callable[[int], None] | None = None,
                 ledger: "Ledger | None" = None):
        """Open the file for a run that has completed `start_step` steps.

        Lines beyond that step move to `metrics.rolled_back.jsonl`.

        Args:
            constants: those of all steps, or a function of the step (counted from 0) where they differ.
            completed: called in every process with each step that the devices completed, on the writer's thread, after
                the ledger.
            ledger: receives which steps are in flight, and provides the goodput for the lines of steps.
        """
        self._last_step, self._log_every, self._tell = last_step, log_every, completed
        self._constants = constants if callable(constants) else lambda step: constants
        self._ledger = ledger
        # Other processes wait for steps in the same way, but write no file.
        self._lines = _JsonLines(Path(directory) / "metrics.jsonl", start_step) if jax.process_index() == 0 else None
        self._sinks: tuple[Sink, ...] = (self._lines, *sinks) if self._lines is not None else tuple(sinks)
        self._slots = threading.Semaphore(max_lag)  # one for each step that may be in flight
        self._queue: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self.last: Record = {}  # the last line of a step, from which checkpoints record the loss
        self._completed: float | None = None  # when the previous step, or the evaluation after it, was complete
        self._times: list[tuple[float, Constants]] = []
        self._idle: list[float] = []
        self._host: list[Mapping[str, float]] = []
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
        self._thread.start()

    def push(self, step: int, metrics: Mapping[str, jax.Array], host_fields: Mapping[str, float] | None = None,
             began: float | None = None) -> None:
        """Pass on the scalars of a step just dispatched; waits only while `max_lag` steps are still in flight.

        Arrays among the metrics are not written: who needs them takes them from the step (`rl.exact`).

        `began`: when its dispatch began, by `time.perf_counter`; None: before the step before was complete.
        """
        if self._ledger is not None:
            self._ledger.dispatched(step)
        self._slots.acquire()
        self._put("step", step, {k: x for k, x in metrics.items() if not np.ndim(x)}, host_fields or {}, began)

    def write_eval(self, step: int, fields: JsonMapping) -> None:
        """Write an evaluation line (`eval_loss`, `eval_bits_per_byte`, ...) after the lines of the steps before it."""
        self._put("eval", step, fields, time.perf_counter())

    def restart_clock(self, during: bool = False) -> None:
        """Exclude what was done since the last step, such as sampling a text, from the next step's time.

        `during`: it was done while the last step was computed, such as compiling, and that step may end later.
        """
        self._put("clock", time.perf_counter(), during)

    def flush(self) -> None:
        """Wait until all lines so far are written, or kept in memory for lack of disk space (then `behind` is true)."""
        written = threading.Event()
        self._put("flush", written)
        written.wait()
        self._raise()

    @property
    def behind(self) -> bool:
        """Whether lines are waiting for disk space (in process 0, which writes them)."""
        return self._lines is not None and self._lines.waiting

    def close(self) -> None:
        """Write what is left and end the thread; raises an error of the thread at the latest here."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
            for sink in self._sinks:
                sink.close()
        self._raise()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            self.close()
        except Exception:
            if error is None:  # otherwise the loop's own error is the one to report
                raise

    def _put(self, *item) -> None:
        self._raise()
        self._queue.put(item)

    def _raise(self) -> None:
        if self._error:
            raise self._error

    def _work(self) -> None:
        """Run the thread; after an error it keeps taking items, so that no caller blocks forever."""
        handlers = {"step": self._step, "eval": self._eval, "clock": self._clock, "flush": self._flush}
        while item := self._queue.get():
            kind, *arguments = item
            try:
                if kind == "flush" or not self._error:
                    handlers[kind](*arguments)
            except Exception as error:
                self._error = error
            finally:
                if kind == "step":
                    self._slots.release()
                item = arguments = None  # free the scalars' buffers while the thread waits

    def _step(self, step: int, metrics: Mapping[str, jax.Array], host_fields: Mapping[str, float],
              began: float | None) -> None:
        jax.block_until_ready(metrics)  # releases the GIL
        now = time.perf_counter()
        if self._ledger is not None:
            self._ledger.completed(step)
        if self._tell:
            self._tell(step)
        if self._completed is not None:
            self._times.append((now - self._completed, self._constants(step - 1)))
            self._idle.append(max(0.0, (began or 0.0) - self._completed))
        self._completed = now
        self._host.append(host_fields)
        if step % self._log_every and step != self._last_step:
            return
        record = {"step": step, **_plain(jax.device_get(dict(metrics))), **self._rates(step)}
        self._times, self._idle, self._host = [], [], []
        self.last = record
        self._write(record)

    def _rates(self, step: int) -> Record:
        """Return the host's measurements of the steps since the last line."""
        last = self._constants(step - 1)
        before = (step - 1) * last.tokens_per_step if last.tokens_before is None else last.tokens_before
        record: Record = {last.unit: before + last.tokens_per_step}
        seconds = sum(time for time, _ in self._times)
        tokens = sum(one.tokens_per_step for _, one in self._times)
        record["step_time_s"] = seconds / len(self._times) if self._times else None
        record["idle_s"] = sum(self._idle) / len(self._idle) if self._idle else None
        for key in dict.fromkeys(key for fields in self._host for key in fields):
            values = [fields[key] for fields in self._host if key in fields]
            record[key] = _number(np.mean(values) if key.endswith("_s") else np.asarray(values[-1]))
        speed = tokens / seconds if seconds else None
        record[f"{last.unit}_per_s"] = speed
        if last.peak:
            for key, field in (("mfu", "flops_per_token"), ("mfu_full", "flops_per_token_full")):
                flops = sum(one.tokens_per_step * getattr(one, field) for _, one in self._times)
                record[key] = speed and mfu(speed, flops / tokens, last.peak)
        if self._ledger is not None:
            record["goodput"] = self._ledger.goodput()
        return {**record, **device_memory()}

    def _eval(self, step: int, fields: JsonMapping, ended: float) -> None:
        self._clock(ended)
        self._write({"step": step, **_plain(jax.device_get(dict(fields)))})

    def _clock(self, ended: float, during: bool = False) -> None:
        # Not now: this thread may be late, and the next step has begun meanwhile.
        self._completed = max(ended, (self._completed or ended) if during else ended)

    def _flush(self, written: threading.Event) -> None:
        try:
            if self._lines and self._lines.waiting:
                self._lines.write_waiting()
        finally:
            written.set()

    def _write(self, record: Record) -> None:
        for sink in self._sinks:
            sink.write(record)


class _JsonLines:
    """The unbuffered file: each line is written by one call, or cut off at the next start if incomplete.

    A full disk must not end weeks of training for a line of metrics: lines that cannot be written are kept in memory,
    and written before the next one.
    """

    def __init__(self, path: Path, start_step: int):
        self._path, self._kept = path, b""
        try:
            if start_step and not path.exists():
                events.tell(path.parent, "metrics_missing", f"{path} is missing, and with it the lines of the first "
                            f"{start_step} steps; it begins again with those to come", step=start_step)
            self._log = AppendLog(path)
            # Steps never decrease in the file, so the lines to drop are a tail, and cutting a tail off is atomic.
            end, damaged = _end_of_step(path, start_step)
            if damaged:
                events.tell(path.parent, "metrics_damaged", f"lines in the middle of {path} are damaged ({damaged} of "
                            "them), as after a power failure; they are left as they are", lines=damaged)
            if whole := list(whole_lines(path, end)):
                with appended(path.with_name("metrics.rolled_back.jsonl")) as kept:
                    kept.write(b"".join(whole))
            self._log.file.truncate(end)
        except OSError as error:
            raise UserError("--workdir", f"{error.filename or path} cannot be written ({error.strerror})",
                            "move it away, or repair the storage") from None

    def write(self, record: Record) -> None:
        had_to_wait = self.waiting
        self._kept += json.dumps(record, allow_nan=False).encode() + b"\n"
        self.write_waiting(had_to_wait)

    @property
    def waiting(self) -> bool:
        """Whether lines are waiting to be written."""
        return bool(self._kept)

    def write_waiting(self, had_to_wait: bool = True) -> None:
        """Try again to write the waiting lines."""
        try:
            self._write()
        except OSError as error:
            if not had_to_wait:
                why = f"{self._path} cannot be written ({error.strerror}); its lines are kept in memory until it can"
                events.tell(self._path.parent, "metrics_kept", why, reason=error.strerror)
        else:
            if had_to_wait:
                events.tell(self._path.parent, "metrics_written", f"{self._path} is written again and complete")

    def _write(self) -> None:
        if self._log.follow():
            events.tell(self._path.parent, "metrics_replaced", f"{self._path} was deleted or replaced while this run "
                        "writes to it; the lines from here on go to the file that is there now")
        self._log.append(self._kept)
        self._kept = b""

    def close(self) -> None:
        try:
            if self._kept:
                self._write()
            os.fsync(self._log.file.fileno())
        except OSError as error:
            raise UserError("--workdir", f"the last lines of {self._path} cannot be written ({error.strerror})",
                            "free space or repair the storage, and run the same command again") from None
        finally:
            self._log.close()


def _end_of_step(path: Path, step: int) -> tuple[int, int]:
    """Return the byte offset at which the complete lines of steps up to `step` end, and how many before it are damaged.

    A step whose digits are damaged may stand on the wrong side: the place that fits most lines is taken.
    """
    end = damaged = seen = fit = best = last = 0
    for line, at in lines_with_ends(path):
        try:
            found = parsed(line, {"step": int})["step"]
        except ValueError:
            seen += 1
            continue
        fit += 1 if found <= step else -1
        seen += found > step
        if found <= step and (fit > best or (fit == best and found >= last)):
            end, damaged, best, last = at, seen, fit, found
    return end, damaged


def _plain(scalars: Mapping[str, AnyArray]) -> Record:
    """Convert host scalars of any dtype to JSON numbers: exact, null if not finite."""
    return {key: _number(np.asarray(value)) for key, value in scalars.items()}


def _number(value: np.ndarray | np.generic) -> float | int | None:
    if value.dtype == bool or np.issubdtype(value.dtype, np.integer):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None
