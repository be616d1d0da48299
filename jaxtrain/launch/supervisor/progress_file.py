"""Track a run's progress from outside, by its metrics.jsonl."""

import contextlib
from pathlib import Path

from jaxtrain.files.bounded_files import opened, parsed


class Steps:
    """The steps recorded in a metrics.jsonl; cheap to poll, since the file is read only when it has changed."""

    def __init__(self, path: Path):
        self._path, self._size, self._lowest = path, -1, 0
        self.newest = 0  # newest step in the file; goes back when a run resumes
        self.best = 0  # highest step ever seen
        self.again = False  # whether a step has completed since `begin`
        self.look()

    def begin(self) -> None:
        """Start a new attempt, which first removes the lines of steps that it will repeat."""
        self._lowest, self.again = max(self._size, 0), False

    def look(self) -> None:
        """Update from the file."""
        try:
            size = self._path.stat().st_size
        except OSError:
            return
        if size == self._size:
            return
        self._size = size
        self.again = self.again or size > self._lowest
        self._lowest = min(self._lowest, size)
        self.newest = self._last_step()
        self.best = max(self.best, self.newest)

    def _last_step(self) -> int:
        with contextlib.suppress(OSError):
            with opened(self._path) as file:
                file.seek(max(0, file.seek(0, 2) - 2**16))
                lines = file.read(2**16).split(b"\n")[:-1]
            for line in reversed(lines):
                with contextlib.suppress(ValueError):
                    return parsed(line, {"step": int})["step"]
        return 0
