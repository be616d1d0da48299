"""The protocol of what yields the batch of each step: a run's own loader, or a source of one's own."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class BatchSource(Protocol):
    """Batches by step: the batch at a step must be a pure function of the step, so that a run can resume anywhere."""

    @property
    def num_batches(self) -> int | None:
        """How many there are; None: there is no end."""
        ...

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """Return the global batch of this step: arrays of shape [rows, tokens]."""
        ...

    def rows(self, step: int, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return only these rows of it: what one of several processes reads."""
        ...

    def shape(self, step: int) -> tuple[int, int]:
        """Return rows, and tokens of a row, at this step."""
        ...

    def shapes_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the shapes that the batches of steps `start` to `stop` may have, each once."""
        ...

    def tokens(self, step: int) -> int:
        """Return the tokens in all batches before this step."""
        ...

    def epochs(self, step: int) -> dict[str, float]:
        """Return how often each named source was gone through before this step."""
        ...
