"""Batches by step from a function of the step."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtrain.base import arguments
from jaxtrain.errors import UserError
from jaxtrain.observe.own_parts import describe

TOKEN_ARRAYS = "tokens", "input_ids", "inputs", "token_ids", "ids"  # names of arrays [rows, tokens] that a model reads


class BatchFunction:
    """A `BatchSource` around a function that returns the whole batch of a step, always of the same shape."""

    gives = "its function returned"  # how an error about a batch begins

    def __init__(self, function: Callable[[int], dict[str, np.ndarray]], *, tokens_per_row: int | None = None,
                 num_batches: int | None = None, identity: Any = None):
        """Call nothing yet.

        Args:
            function: from the step, counted from 0, to a dict of arrays whose first dimension is the example. It must
                return the same for the same step, whenever it is asked.
            tokens_per_row: the tokens of an example, which metrics.jsonl counts in `tokens` and `tokens_per_s`. None:
                the second dimension of an integer array of two dimensions whose name is one of `TOKEN_ARRAYS`; without
                one, `examples` and `examples_per_s` are written instead.
            num_batches: how many steps there are; None: there is no end.
            identity: what tells these data from others, in plain JSON, such as a path and a seed; a workdir is not
                resumed with another. None: the function's name and the plain values that it closes over.
        """
        if tokens_per_row is not None and (isinstance(tokens_per_row, bool) or not isinstance(
                tokens_per_row, int | np.integer) or tokens_per_row < 1):
            raise UserError("tokens_per_row", f"{tokens_per_row!r} is not a number of tokens", "give 1 or more")
        arguments.is_function("data", function, "give jt.BatchFunction a function of the step that returns a batch", 1)
        if num_batches is not None:
            arguments.is_seed("num_batches", num_batches)
        self._function, self._given, self.num_batches = function, tokens_per_row, num_batches
        self.identity = describe(function) if identity is None else identity

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """Return the whole batch of this step."""
        return self._function(step)

    def rows(self, step: int, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return only these rows of it."""
        return {key: np.asarray(x)[list(indices)] for key, x in self._function(step).items()}

    def shape(self, step: int) -> tuple[int, int]:
        """Return rows, and tokens of a row (1: it is an example without tokens): the same at every step."""
        return self._shape

    def shapes_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the one shape."""
        return [self.shape(start)] if start < stop else []

    def tokens(self, step: int) -> int:
        """Return the tokens in all batches before this step."""
        return step * math.prod(self._shape)

    def epochs(self, step: int) -> dict[str, float]:
        """Return {}: the length of an epoch is unknown."""
        return {}

    @cached_property
    def _shape(self) -> tuple[int, int]:
        first = self._function(0)
        try:
            sizes = [np.shape(x)[:1] for x in first.values()] if isinstance(first, dict) else []
        except ValueError:  # lists of different lengths
            sizes = []
        if not sizes or () in sizes:
            raise UserError("data", f"{self.gives} no dict of arrays with an example in each row",
                            'return for example {"x": images, "y": labels}')
        lengths = [np.shape(first[name])[1] for name in TOKEN_ARRAYS if name in first and np.ndim(first[name]) == 2
                   and jnp.issubdtype(jnp.result_type(first[name]), jnp.integer)]
        return sizes[0][0], int(self._given or (lengths or [1])[0])
