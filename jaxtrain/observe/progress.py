"""The progress display: a live line or panel on a terminal (live_display.py), or a few plain lines in a log."""

import contextlib
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, TextIO

from jaxtrain.observe.metrics import Record
from jaxtrain.redaction import printable

# Means over steps, and over their time.
_OF_STEPS, _OF_TIME = ("step_time_s", "data_wait_s"), ("tokens_per_s", "examples_per_s", "mfu")


class Progress:
    """A sink that shows step, loss, throughput, time left, and the share of time spent waiting for data if it matters.

    On a terminal it is redrawn at most ten times a second. Elsewhere a line is printed at the first step and
    about every tenth of the run, and for every evaluation. Times and speeds are means over the steps since the line
    before: one step may have few tokens, or be one that others delayed.
    """

    def __init__(self, steps: int, *, start_step: int = 0, stream: TextIO | None = None, workdir: Path | None = None,
                 interrupt: Any = None):
        """Set up for a run of `steps` steps, of which `start_step` are complete.

        Args:
            steps: of the whole run.
            start_step: those that are complete.
            stream: where it is shown; None: on stderr.
            workdir: the run's, for its events.
            interrupt: its `signal` is not 0 once the run was asked to stop.
        """
        self._steps, self._stream = steps, stream or sys.stderr
        self._sums: defaultdict[str, float] = defaultdict(float)  # of the steps that were not shown
        self._tenth, self._drawn = -1 if not start_step else 10 * start_step // steps, 0.0
        self._live = None
        if self._stream.isatty():
            from jaxtrain.observe.live_display import LiveDisplay

            self._live = LiveDisplay(self._stream, steps, start_step, workdir, interrupt)

    def write(self, record: Record) -> None:
        """Show a line of metrics.jsonl."""
        step, now = int(record["step"] or 0), time.monotonic()
        if "eval_loss" in record:
            text = _text(record, self._steps)
            self._print(text) if self._live is None else self._live.evaluated(record, text)
            return
        self._add(record)
        tenth = 10 * step // self._steps
        if self._live is None and tenth > self._tenth:
            self._print(_text(self._mean(record), self._steps))
            self._tenth = tenth
        elif self._live is not None and (now - self._drawn >= 0.1 or step == self._steps):
            shown = self._mean(record)
            self._live.show(shown, _text(shown, self._steps))
            self._drawn = now

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a log on a full disk
            print(f"{printable(text)}\n", end="", file=self._stream, flush=True)  # whole

    def _add(self, record: Record) -> None:
        if seconds := record.get("step_time_s"):
            self._sums["steps"] += 1
            self._sums["seconds"] += seconds
            for names, weight in ((_OF_STEPS, 1.0), (_OF_TIME, seconds)):
                for name in names:
                    self._sums[name] += weight * (record.get(name) or 0.0)

    def _mean(self, record: Record) -> Record:
        """Return the newest line with the means of all that were not shown."""
        sums, self._sums = self._sums, defaultdict(float)
        means = {name: sums[name] / sums[by] for names, by in ((_OF_STEPS, "steps"), (_OF_TIME, "seconds"))
                 for name in names} if sums else {}
        return record | {name: mean for name, mean in means.items() if record.get(name) is not None}

    def close(self) -> None:
        """Stop redrawing, and leave the last line on the screen."""
        if self._live is not None:
            self._live.stop()


def _text(record: Record, steps: int) -> str:
    step = int(record["step"] or 0)
    parts = [f"step {step}/{steps}"]
    if "eval_loss" in record:
        shown = {"eval_loss": "evaluation loss", "eval_loss_ema": "with averages", "eval_bits_per_byte": "bits/byte"}
        parts += [f"{words} {_value(record[key])}" for key, words in shown.items() if key in record]
        return "  ".join(parts)
    parts += [f"{key} {_value(record.get(key))}" for key in ("loss", "reward") if key in ("loss", *record)]
    parts += [f"{record[key]:,.0f} {unit}/s" for unit in ("tokens", "examples") if record.get(key := f"{unit}_per_s")]
    if record.get("mfu"):
        parts.append(f"mfu {record['mfu']:.1%}")
    if record.get("step_time_s"):
        parts.append(f"{_duration((steps - step) * record['step_time_s'])} left")
        waits = (record.get("data_wait_s") or 0) / record["step_time_s"]
        parts += [f"waits for data {waits:.0%} of the time"] * (waits >= 0.02)  # less is as it should be
    return "  ".join(parts)


def _value(number: float | None) -> str:
    return "not finite" if number is None else f"{number:.4f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
