"""The display of a training run on a terminal: a panel where there is room for it, or one line.

Drawn at most ten times a second, on the thread that writes metrics.
"""

import contextlib
import math
import os
import time
from array import array
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn

from jaxtrain.files.log_tail import LogTail
from jaxtrain.observe.goodput import duration
from jaxtrain.observe.metrics import Record
from jaxtrain.observe.run_panel import Reading, figures_of, note, panel
from jaxtrain.pages.plain_text import age

WIDE, HIGH = 100, 20  # columns and lines of a terminal that has room for the panel
_EVENTS = 2**16  # bytes of the newest events that are read
_LOSSES = 2**20  # bytes of the newest lines of metrics that a run which goes on shows at once
_KEPT = 2**12  # losses
_LOOK_S = 1.0  # seconds between looks at events


class LiveDisplay(Progress):
    """A progress line that becomes a panel on a wide terminal."""

    def __init__(self, stream: TextIO, steps: int, start_step: int, workdir: Path | None = None,
                 interrupt: Any = None):
        """Begin to draw; the arguments are those of `Progress`."""
        self._interrupt = interrupt
        self._record: Record = {}
        self._evaluation: Record = {}
        self._losses, self._seen, self._every = array("d"), 0, 1
        self._workdir, self._looked = workdir, 0.0
        self._saved: tuple[int, float] | None = None  # the step of the last save, and when it was complete
        self._note = ""
        self._events = LogTail(workdir / "events.jsonl", {"kind": str}, _EVENTS) if workdir else None
        if workdir and start_step:
            for line in LogTail(workdir / "metrics.jsonl", {"step": int}, _LOSSES).added():
                if line["step"] <= start_step and "loss" in line:  # others are about to be taken back
                    self._keep(line)
        super().__init__(BarColumn(bar_width=20), TextColumn("{task.description}"), auto_refresh=False,
                         console=Console(file=stream))
        self._task = self.add_task("compiling", total=steps, completed=start_step)
        self.start()

    def show(self, record: Record, text: str) -> None:
        """Draw a step's line of metrics, which is `text` in words."""
        self._keep(record)
        self._record = record
        with contextlib.suppress(OSError):  # the terminal is gone
            self.update(self._task, completed=int(record["step"] or 0), description=text)
            self.refresh()

    def evaluated(self, record: Record, text: str) -> None:
        """Print an evaluation above what is drawn."""
        self._evaluation = record
        with contextlib.suppress(OSError):
            self.console.print(text, highlight=False, markup=False)

    def get_renderable(self) -> Group:
        """Return what is drawn now; a terminal may have become larger or smaller."""
        if self._record and self._has_room():
            with contextlib.suppress(Exception):  # whatever a damaged log holds, a frame must not end a run
                return Group(panel(self._reading(), self.console.width, rows=3))
        return Group(*self.get_renderables())

    def _has_room(self) -> bool:
        """Return whether the terminal is large enough, and shows more than ASCII."""
        large = self.console.width >= WIDE and self.console.height >= HIGH
        return large and not self.console.options.ascii_only

    def _keep(self, record: Record) -> None:
        """Add a loss to the curve, of which a long run keeps every second, fourth, ... one."""
        loss = record.get("loss")
        if self._seen % self._every == 0:
            self._losses.append(loss if isinstance(loss, int | float) else math.nan)
        self._seen += 1
        if len(self._losses) == _KEPT:
            self._losses, self._every = self._losses[::2], 2 * self._every

    def _reading(self) -> Reading:
        now = time.time()
        if now - self._looked >= _LOOK_S:
            self._looked = now
            self._look()
        record, task = self._record, self.tasks[self._task]
        step, last = int(task.completed), int(task.total or 0)
        figures = figures_of(record)
        if isinstance(loss := self._evaluation.get("eval_loss"), float):
            figures["eval_loss"] = f"{loss:.4f}"
        figures |= {"memory": memory} if (memory := _memory(record)) else {}
        if self._saved:
            figures["last save"] = f"step {self._saved[0]}, {age(now - self._saved[1])} ago"
        pace = record.get("step_time_s")
        state = "stopping after this step; Ctrl-C ends at once" if getattr(self._interrupt, "signal", 0) else ""
        return Reading(f"{self._workdir or 'training'}", step, last, state, losses=self._losses, figures=figures,
                       left=duration((last - step) * pace) if pace else "", notes=[self._note] if self._note else [])

    def _look(self) -> None:
        """Read what is new in the events."""
        for event in self._events.added() if self._events else ():
            step, at = event.get("step"), event.get("time")
            if event["kind"] == "checkpoint" and isinstance(step, int) and isinstance(at, float):
                self._saved = step, at
            else:
                self._note = note(event)


def _memory(record: Record) -> str:
    """Return how much of a device's memory was in use at a line, or of the host's now where the devices do not tell."""
    if (used := record.get("memory_bytes")) and (limit := record.get("memory_limit_bytes")):
        return f"{used / 1e9:.1f} of {limit / 1e9:.1f} GB"
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # not Linux
        return ""
    return f"{pages * os.sysconf('SC_PAGE_SIZE') / 1e9:.1f} GB of the host"
