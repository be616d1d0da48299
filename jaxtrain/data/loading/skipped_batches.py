"""The record of batches that a run skips after a rollback; with the step, it determines the data of a step.

The batch at step n is the n-th that is not in the record. The record is kept in the workdir and with every checkpoint.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import misfit, read_json, reason

FILE = "skipped_batches.json"
_FORM = {"batches?": [int], "rollbacks?": int, "void_above?": int | None}


@dataclass(frozen=True)
class SkippedBatches:
    """The record of skipped batches: steps count what the run trains, batches what the data holds, both from 0."""

    batches: tuple[int, ...] = ()  # in rising order
    rollbacks: int = 0
    void_above: int | None = None  # later checkpoints trained on skipped batches, and must be removed

    @classmethod
    def read(cls, workdir: str | Path) -> "SkippedBatches | None":
        """Return the record in a workdir, or None if it has none."""
        path = Path(workdir) / FILE
        try:
            return cls.of(read_json(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError("--workdir", f"{path} is not a valid record of skipped batches: it {reason(error)}",
                            "correct it, or delete it") from None

    @classmethod
    def of(cls, record: JsonMapping) -> "SkippedBatches":
        """Return the record that plain JSON describes."""
        batches = record.get("batches", ())
        if wrong := misfit(record, _FORM) or "batches are negative" * (min(batches, default=0) < 0):
            raise ValueError(f"is not of the form expected: {wrong}")
        return cls(tuple(sorted(set(batches))), record.get("rollbacks", 0), record.get("void_above"))

    def write(self, workdir: str | Path) -> None:
        """Write the record atomically and durably, before anything acts on it."""
        content = json.dumps(self.to_dict() | {"void_above": self.void_above}) + "\n"
        atomic_files.write(Path(workdir) / FILE, content, durable=True)

    def to_dict(self) -> JsonObject:
        """Return the part that is saved in a checkpoint."""
        return {"batches": list(self.batches), "rollbacks": self.rollbacks}

    def batch(self, step: int) -> int:
        """Return the number of the batch that is trained on at `step`."""
        for skipped in self.batches:
            step += skipped <= step
        return step

    def reach(self, steps: int) -> int:
        """Return how many batches the first `steps` steps went through, including those skipped between them."""
        return self.batch(steps - 1) + 1 if steps > 0 else 0

    def agrees(self, other: "SkippedBatches", steps: int) -> bool:
        """Return whether the first `steps` steps have the same batches by both records."""
        reach = self.reach(steps)
        return reach == other.reach(steps) and all(
            (batch in other.batches) == (batch in self.batches) for batch in (*self.batches, *other.batches)
            if batch < reach)

    def after_rollback(self, first: int, last: int) -> "SkippedBatches":
        """Return the record with these steps' batches skipped too; only checkpoints up to `first` may be restored."""
        more = {self.batch(step) for step in range(first, last + 1)}
        return SkippedBatches(tuple(sorted({*self.batches, *more})), self.rollbacks + 1, first)


class Remaining:
    """A batch source like loader.Batches without the skipped batches."""

    def __init__(self, batches: BatchSource, passed: SkippedBatches):
        self._batches: Any = batches
        self._passed = passed
        ends = batches.num_batches
        gone = sum(ends is None or batch < ends for batch in passed.batches)
        self.num_batches = None if ends is None else ends - gone
        in_order: Any = batches
        if hasattr(batches, "restore"):  # they are read in order, by a state
            self.state = lambda step: in_order.state(passed.reach(step))
            self.restore = lambda step, state: in_order.restore(passed.reach(step), state)

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return self._batches[self._passed.batch(step)]

    def rows(self, step: int, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return only these rows of the global batch at `step`."""
        return self._batches.rows(self._passed.batch(step), indices)

    def shape(self, step: int) -> tuple[int, int]:
        """Return the number of rows, and of tokens per row, at this step."""
        return self._batches.shape(self._passed.batch(step))

    def shapes_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the distinct shapes that the batches of steps `start` to `stop` may have."""
        return self._batches.shapes_of(self._passed.batch(start), self._passed.reach(stop)) if start < stop else []

    def tokens(self, step: int) -> int:
        """Return the number of tokens trained on before this step."""
        reach = self._passed.reach(step)
        gone = (self._batches.shape(batch) for batch in self._passed.batches if batch < reach)
        return self._batches.tokens(reach) - sum(map(math.prod, gone))

    def epochs(self, step: int) -> dict[str, float]:
        """Return the number of epochs over each source before this step."""
        return self._batches.epochs(self._passed.reach(step))

    def origin(self, step: int, index: int) -> Any:
        """Return the source of a row, the rows of that source, and its number there."""
        return self._batches.origin(self._passed.batch(step), index)


def remaining(batches: BatchSource, passed: SkippedBatches) -> BatchSource:
    """Return the batches of a run with this record."""
    return Remaining(batches, passed) if passed.batches else batches
