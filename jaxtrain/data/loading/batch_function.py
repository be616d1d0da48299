"""Batches by step from a function of the step."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.observe.own_parts import describe


class BatchFunction:
    """A `BatchSource` around a function that returns the whole batch of a step, always of the same shape."""

    def __init__(self, function: Callable[[int], dict[str, np.ndarray]], *, tokens_per_row: int = 1,
                 num_batches: int | None = None, identity: Any = None):
        """Call nothing yet.

        Args:
            function: from the step, counted from 0, to a dict of arrays whose first dimension is the example. It must
                return the same for the same step, whenever it is asked.
            tokens_per_row: what an example counts for in `tokens` and `tokens_per_s` of metrics.jsonl.
            num_batches: how many steps there are; None: there is no end.
            identity: what tells these data from others, in plain JSON, such as a path and a seed; a workdir is not
                resumed with another. None: the function's name and the plain values that it closes over.
        """
        self._function, self._tokens, self.num_batches = function, tokens_per_row, num_batches
        self.identity = describe(function) if identity is None else identity

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """Return the whole batch of this step."""
        return self._function(step)

    def rows(self, step: int, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return only these rows of it."""
        return {key: np.asarray(x)[list(indices)] for key, x in self._function(step).items()}

    def shape(self, step: int) -> tuple[int, int]:
        """Return rows, and tokens of a row: the same at every step."""
        return self._rows, self._tokens

    def shapes_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the one shape."""
        return [self.shape(start)] if start < stop else []

    def tokens(self, step: int) -> int:
        """Return the tokens in all batches before this step."""
        return step * self._rows * self._tokens

    def epochs(self, step: int) -> dict[str, float]:
        """Return {}: the length of an epoch is unknown."""
        return {}

    @cached_property
    def _rows(self) -> int:
        first = self._function(0)
        sizes = [np.shape(x)[:1] for x in first.values()] if isinstance(first, dict) else []
        if not sizes or () in sizes:
            raise UserError("data", "its function returned no dict of arrays with an example in each row",
                            'return for example {"x": images, "y": labels}')
        return sizes[0][0]
