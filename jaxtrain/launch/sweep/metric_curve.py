"""What a run has written of one metric so far."""

import math
from pathlib import Path

from jaxtrain.files.bounded_files import lines_with_ends, parsed


class MetricCurve:
    """A metric by step, its tokens, and the newest step; reads only what was added to metrics.jsonl since."""

    def __init__(self, workdir: Path, metric: str):
        self._path, self._metric = workdir / "metrics.jsonl", metric
        self._forget()

    def _forget(self) -> None:
        self._size, self._last, self.values, self.tokens = 0, b"", dict[int, float](), dict[int, int]()

    @property
    def steps(self) -> int:
        """The newest step."""
        return max(self.tokens.keys() | self.values.keys(), default=0)

    def look(self) -> None:
        """Read what is new; a run that resumes takes lines back, and all is read again."""
        try:
            lines = lines_with_ends(self._path, self._size - len(self._last))
            if self._last and next(lines, (b"", 0))[0] != self._last:
                self._forget()
                lines = lines_with_ends(self._path)
            for line, end in lines:
                self._add(line)
                self._size, self._last = end, line
        except OSError:
            return

    def _add(self, line: bytes) -> None:
        try:
            said = parsed(line, {"step": int, "tokens?": int})
        except ValueError:
            return
        step = said["step"]
        if "tokens" in said:
            self.tokens[step] = said["tokens"]
        if self._metric in said:
            value = said[self._metric]
            self.values[step] = value if isinstance(value, int | float) else math.nan  # null stands for NaN

    def at(self, step: int) -> float | None:
        """Return the newest value up to a step; None: there is none yet."""
        newest = max((known for known in self.values if known <= step), default=None)
        return None if newest is None else self.values[newest]

    def reached(self, step: int) -> bool:
        """Return whether the value at a step is final: an evaluation's line comes after that of its step."""
        return step in self.values or self.steps > step
