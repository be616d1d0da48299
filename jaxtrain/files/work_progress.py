"""Show on a terminal, or now and then in a log, how far a command is; what it prints as its result is not touched."""

import shutil
import sys
import threading
import time
from datetime import timedelta
from typing import TextIO

from jaxtrain.redaction import printable

PATIENCE_S = 2.0  # seconds for which nothing is said, since most work takes no longer
LOG_S = 30.0  # seconds between two lines in a log
_DRAW_S = 0.1  # seconds between two on a terminal


class Line:
    """Prints one line at a time: on a terminal in place of the previous one, elsewhere at most every `every` seconds.

    The last line is always printed, unless there is an error, or `last` is false: then a terminal has none of it left.
    """

    def __init__(self, stream: TextIO, every: float = 5.0, last: bool = True):
        self.stream, self.every, self.last, self.terminal = stream, every, last, stream.isatty()
        self.spoke = time.monotonic()
        self.held = ""  # printed at the end, unless there is a newer line

    def __call__(self, text: str) -> None:
        """Print a line now, or keep it until the end or a newer line."""
        self.held = text = printable(text)
        if self.terminal:
            self._print(f"\r\x1b[2K{text[:shutil.get_terminal_size().columns - 1]}", end="")
        elif time.monotonic() - self.spoke >= self.every:
            self._print(text)
            self.held, self.spoke = "", time.monotonic()

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, error, *_) -> None:
        gone = error or not self.last
        if self.terminal:
            self._print("\r\x1b[2K" if gone else "", end="" if gone else "\n")
        elif self.held and not gone:
            self._print(self.held)

    def _print(self, text: str, end: str = "\n") -> None:
        print(text, end=end, file=self.stream, flush=True)


class Work:
    """Tells the share, the rate and the time left of work that takes longer than two seconds; from any thread.

    Use it as a context manager: at its end a terminal has nothing of it left.
    """

    def __init__(self, what: str, total: float = 0, unit: str = "", *, quiet: bool = False,
                 stream: TextIO | None = None):
        """Begin to count.

        Args:
            what: the work, in a word or two.
            total: how much there is to do.
            unit: what is counted; "": bytes.
            quiet: say nothing, as all processes of a run but one.
            stream: where it is said; None: on stderr.
        """
        self.total, self._what, self._unit, self._quiet = total, what, unit, quiet
        self._line = Line(stream or sys.stderr, LOG_S, last=False)
        self._began, self._drawn, self._done = time.monotonic(), 0.0, 0.0
        self._lock, self._shown = threading.Lock(), False

    def add(self, amount: float = 1) -> None:
        """Count what was done."""
        with self._lock:
            self._done += amount
            now = time.monotonic()
            if self._quiet or now - self._began < PATIENCE_S or now - self._drawn < _DRAW_S:
                return
            self._drawn, self._shown = now, True
            self._line(self.text(now - self._began))

    def text(self, seconds: float) -> str:
        """Return what is said after this many seconds."""
        rate = self._done / seconds
        if self._unit:
            words = [f"{self._done:,.0f} of {self.total:,.0f} {self._unit}", f"{rate:.3g} per second"]
        else:
            words = [f"{self._done / 1e9:.2f} of {self.total / 1e9:.2f} GB", f"{rate / 1e6:,.0f} MB/s"]
        left = timedelta(seconds=round(max(0.0, self.total - self._done) / rate)) if rate else "unknown time"
        return ", ".join([f"{self._what}: {words[0]}", f"{min(1.0, self._done / max(1.0, self.total)):.0%}", words[1],
                          f"{left} left"])

    def __enter__(self) -> "Work":
        return self

    def __exit__(self, *error) -> None:
        if self._shown:
            self._line.__exit__(*error)
