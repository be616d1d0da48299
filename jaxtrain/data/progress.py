"""How far the work is: a line that is rewritten in a terminal; elsewhere a new one every few seconds."""

import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TextIO


class Progress:
    """Share, rate and time left; what earlier runs did counts for the share only."""

    def __init__(self, what: str, sizes: list[int], missing: list[int], say: Callable[[str], None]):
        self.what, self.sizes, self.say = what, sizes, say
        self.total, self.left = sum(sizes), sum(sizes[number] for number in missing)
        self.tasks = len(sizes) - len(missing)
        self.started, self.done = time.monotonic(), 0
        if missing:
            say(f"{what}: {self.tasks} of {len(sizes)} tasks done")

    def add(self, number: int) -> None:
        """A task is done."""
        self.tasks += 1
        self.done += self.sizes[number]
        self.left -= self.sizes[number]
        rate = max(1, self.done) / max(1e-9, time.monotonic() - self.started)
        share = 1 - self.left / self.total if self.total else 1
        self.say(f"{self.what}: {self.tasks} of {len(self.sizes)} tasks, {share:.1%}, {rate / 1e6:.2f} MB/s, "
                 f"{timedelta(seconds=round(self.left / rate))} left")


class Line:
    """Says one line at a time: on a terminal in place of the one before, elsewhere not sooner than `every` seconds.

    The last one is always said, unless there is an error to be said instead.
    """

    def __init__(self, stream: TextIO, every: float = 5.0):
        self.stream, self.every, self.terminal = stream, every, stream.isatty()
        self.spoke = time.monotonic()
        self.held = ""  # what is still to be said, if nothing newer comes

    def __call__(self, text: str) -> None:
        """Say it now, or keep it until the end or something newer."""
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
