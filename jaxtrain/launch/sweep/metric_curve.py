"""The values of one metric that a run has written so far."""

import math
from pathlib import Path

from jaxtrain.base.annotations import JsonObject
from jaxtrain.files.log_tail import LogTail


class MetricCurve:
    """A metric by step, its tokens, and the newest step; reads only what was added to metrics.jsonl since."""

    def __init__(self, workdir: Path, metric: str):
        self._log, self._metric = LogTail(workdir / "metrics.jsonl", {"step": int, "tokens?": int}), metric
        self.values, self.tokens = dict[int, float](), dict[int, int]()

    @property
    def steps(self) -> int:
        """The newest step."""
        return max(self.tokens.keys() | self.values.keys(), default=0)

    def look(self) -> None:
        """Read what is new; a run that resumes takes lines back, and all is read again."""
        if self._log.shrunk():
            self.values, self.tokens = {}, {}
        for line in self._log.added():
            self._add(line)

    def _add(self, said: JsonObject) -> None:
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
