"""The protocol of batch sources: objects that give the batch of each step, built in or your own."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np


class BatchSource(Protocol):
    """Batches by step; the batch must be a pure function of the step, so that a run can resume anywhere."""

    @property
    def num_batches(self) -> int | None:
        """The number of batches; None: endless."""
        ...

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """Return the global batch of this step: arrays of shape [rows, tokens]."""
        ...

    def rows(self, step: int, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return only these rows of the batch: those that one of several processes needs."""
        ...

    def shape(self, step: int) -> tuple[int, int]:
        """Return the number of rows, and of tokens per row, at this step."""
        ...

    def shapes_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the distinct shapes that the batches of steps `start` to `stop` may have."""
        ...

    def tokens(self, step: int) -> int:
        """Return the number of tokens in all batches before this step."""
        ...

    def epochs(self, step: int) -> dict[str, float]:
        """Return the number of epochs over each named source before this step."""
        ...


def of_process(batches: BatchSource, step: int, rows: Mapping[int, Sequence[int]] | None) -> dict[str, np.ndarray]:
    """Return the batch of a step, or these rows of it, by how many it has."""
    return batches[step] if rows is None else batches.rows(step, rows[batches.shape(step)[0]])
