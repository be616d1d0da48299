"""Show the progress of a preparation: one line, rewritten in place on a terminal, printed at intervals elsewhere."""

import shutil
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TextIO

from jaxtrain.data.formats.inputs import total_size
from jaxtrain.data.prepare.tasks import Task


class Progress:
    """Share, rate and time left of the tasks in `ours`; tasks done before count only towards the share.

    With a number of `workers`, also how many of them are busy: all, until fewer tasks than workers are left. An
    engine of one's own does not tell.
    """

    def __init__(self, what: str, tasks: Sequence[Task], ours: Sequence[int], missing: Sequence[int],
                 say: Callable[[str], None], workers: Any = 1):
        self.what, self.say, self.of = what, say, len(ours)
        self.sizes = {number: total_size([tasks[number]]) for number in ours}
        self.total, self.left = sum(self.sizes.values()), sum(self.sizes[number] for number in missing)
        self.tasks, self.before = len(ours) - len(missing), self.left
        self.started = time.monotonic()
        self.workers = workers if isinstance(workers, int) else 0
        if missing:
            say(f"{what}: {self.tasks:,} of {self.of:,} tasks{self._busy()}")

    def add(self, number: int) -> None:
        """Count a task as done."""
        self.tasks += 1
        self.left -= self.sizes[number]
        rate = max(1, self.before - self.left) / max(1e-9, time.monotonic() - self.started)
        self.say(f"{self.what}: {self.tasks:,} of {self.of:,} tasks, {1 - self.left / max(1, self.total):.1%}, "
                 f"{rate / 1e6:.2f} MB/s{self._busy()}, {timedelta(seconds=round(self.left / rate))} left")

    def _busy(self) -> str:
        left = self.of - self.tasks
        return f", {min(self.workers, left):,} of {self.workers:,} workers busy" if self.workers and left else ""


class Line:
    """Prints one line at a time: on a terminal in place of the previous one, elsewhere at most every `every` seconds.

    The last line is always printed, unless there is an error.
    """

    def __init__(self, stream: TextIO, every: float = 5.0):
        self.stream, self.every, self.terminal = stream, every, stream.isatty()
        self.spoke = time.monotonic()
        self.held = ""  # printed at the end, unless there is a newer line

    def __call__(self, text: str) -> None:
        """Print a line now, or keep it until the end or a newer line."""
        self.held = text
        if self.terminal:
            self._print(f"\r\x1b[2K{text[:shutil.get_terminal_size().columns - 1]}", end="")
        elif time.monotonic() - self.spoke >= self.every:
            self._print(text)
            self.held, self.spoke = "", time.monotonic()

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, error, *_) -> None:
        if self.terminal:
            self._print("\r\x1b[2K" if error else "", end="" if error else "\n")
        elif self.held and not error:
            self._print(self.held)

    def _print(self, text: str, end: str = "\n") -> None:
        print(text, end=end, file=self.stream, flush=True)
