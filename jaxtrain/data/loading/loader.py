"""Batches by step number.

The order of rows can be computed at any place (shuffle.py), so the step number alone determines which rows a batch
holds: a restart needs no data loader state, and processes need no coordination.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from jaxtrain.base.annotations import PyTree
from jaxtrain.data.loading.readahead import ReadAhead
from jaxtrain.data.loading.shuffle import Order


class Rows(Protocol):
    """The protocol of rows by number: dicts of arrays with the same names, shapes and dtypes, among them `weights`.

    Rows that are cheaper to read together also have `take(numbers)`, which returns several rows stacked.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict[str, np.ndarray]: ...


class Batches:
    """Batches by step: `batches[step]` is the global batch, a dict of [global_batch_size, ...] arrays.

    With `repeat` epochs follow each other without end, and a batch may take its last rows from the next epoch, so no
    row is lost. Without it there are `num_batches`, and the last one is filled up with rows of zeros (of weight 0).
    `threads` rows are read at once, those of the next steps too; use it where reading waits for a network.
    """

    def __init__(self, rows: Rows, *, global_batch_size: int, seed: int, shuffle: bool = True, repeat: bool = True,
                 threads: int = 0):
        self.all_rows, self.order = rows, Order(len(rows), seed, shuffle)
        self._ahead = ReadAhead(self._read, threads) if threads else None
        self.global_batch_size = global_batch_size
        self.num_batches = None if repeat else -(-len(rows) // global_batch_size)  # None: no end

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return self.rows(step, range(self.global_batch_size))

    def rows(self, step: int, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return only these rows of the global batch at `step`: those that one process needs."""
        if step < 0 or (self.num_batches is not None and step >= self.num_batches):
            raise IndexError(f"batch {step} of {self.num_batches}")
        within = np.asarray(indices, np.int64)
        for index in within[(within < 0) | (within >= self.global_batch_size)]:
            raise IndexError(f"row {index} of a batch of {self.global_batch_size}")
        return self._ahead.rows(step, within) if self._ahead else self._read(step, within)

    def _read(self, step: int, within: np.ndarray) -> dict[str, np.ndarray]:
        places = int(step) * self.global_batch_size + within
        there = places < len(self.all_rows) if self.num_batches else np.ones(len(places), bool)
        if there.all():
            return take(self.all_rows, self.order.rows(places))
        batch = {name: np.zeros((len(places), *x.shape), x.dtype) for name, x in self.all_rows[0].items()}
        if there.any():
            for name, column in take(self.all_rows, self.order.rows(places[there])).items():
                batch[name][there] = column
        return batch

    def origin(self, step: int, index: int) -> tuple[str, Rows, int | None]:
        """Return a row's source ("": the only one), that source's rows, and its number there; None: an empty row."""
        place = step * self.global_batch_size + index
        if self.num_batches and place >= len(self.all_rows):
            return "", self.all_rows, None
        return "", self.all_rows, int(self.order.rows(np.array([place]))[0])

    def shape(self, step: int) -> tuple[int, int]:
        """Return the number of rows, and of tokens per row, which is the same at every step."""
        return self.global_batch_size, self._row_length

    @functools.cached_property
    def _row_length(self) -> int:
        return len(self.all_rows[0]["weights"])

    def shapes_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the distinct shapes of the batches of steps `start` to `stop`."""
        return [self.shape(start)] if start < stop else []

    def tokens(self, step: int) -> int:
        """Return the number of tokens in all batches before this step."""
        return step * math.prod(self.shape(step))

    def epochs(self, step: int) -> dict[str, float]:
        """Return the number of epochs over all rows before this step."""
        return {"": step * self.global_batch_size / len(self.all_rows)}


def take(rows: Rows, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Return several rows stacked."""
    if method := getattr(rows, "take", None):
        return method(numbers)
    chosen = [rows[number] for number in numbers.tolist()]
    return {name: np.stack([row[name] for row in chosen]) for name in chosen[0]}


class in_step(Iterator[tuple[int, PyTree, float]]):
    """Iterate like `prefetch`, but place each step only when it is asked for, on the caller's thread.

    For batches that depend on what the steps before them have done.
    """

    def __init__(self, batches: Any, start_step: int, num_steps: int, place: Callable[[int, PyTree], PyTree],
                 forget: Callable[[], None] | None = None):
        """`forget`: called at the end, for batches of which something is made ahead."""
        self._steps = iter(range(start_step, start_step + num_steps))
        self._place, self._batches, self._forget = place, batches, forget

    def __next__(self) -> tuple[int, PyTree, float]:
        step, start = next(self._steps), time.perf_counter()
        return step, self._place(step, self._batches), time.perf_counter() - start

    def __enter__(self) -> "in_step":
        return self

    def __exit__(self, *error) -> None:
        if self._forget:
            self._forget()

    def begin(self) -> None:
        """Prepare nothing ahead."""
