"""Batches by step number, and a thread that prepares the next ones while the device computes.

The order of all rows is known at any place (shuffle.py). So the step number alone says which rows a batch holds: a
restart needs no state, and processes need not agree on anything.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from jaxtrain.data.loading.readahead import ReadAhead
from jaxtrain.data.loading.shuffle import Order


class Rows(Protocol):
    """Random access to rows: dicts of arrays with the same names, shapes and dtypes, among them `weights`.

    Rows that are cheaper by the batch have `take(numbers)` too: several at once, each array with one dimension more.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict[str, np.ndarray]: ...


class Batches:
    """`batches[step]`: the global batch at `step`, a dict of [global_batch_size, ...] arrays.

    With `repeat` the epochs follow each other without end, and a batch may take its last rows from the next epoch: no
    row is lost. Without, there are `num_batches`, and the last one is filled up with rows of zeros (so, of weight 0).
    With `threads` so many rows are read at once, those of the next steps too: for where reading is waiting.
    """

    def __init__(self, rows: Rows, *, global_batch_size: int, seed: int, shuffle: bool = True, repeat: bool = True,
                 threads: int = 0):
        self._rows, self._order = rows, Order(len(rows), seed, shuffle)
        self._ahead = ReadAhead(self._read, threads) if threads else None
        self.global_batch_size = global_batch_size
        self.num_batches = None if repeat else -(-len(rows) // global_batch_size)  # None: no end

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return self.rows(step, range(self.global_batch_size))

    def rows(self, step: int, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Only these rows of the global batch at `step`: what one process reads of it."""
        if step < 0 or (self.num_batches is not None and step >= self.num_batches):
            raise IndexError(f"batch {step} of {self.num_batches}")
        within = np.asarray(indices, np.int64)
        for index in within[(within < 0) | (within >= self.global_batch_size)]:
            raise IndexError(f"row {index} of a batch of {self.global_batch_size}")
        return self._ahead.rows(step, within) if self._ahead else self._read(step, within)

    def _read(self, step: int, within: np.ndarray) -> dict[str, np.ndarray]:
        places = int(step) * self.global_batch_size + within
        there = places < len(self._rows) if self.num_batches else np.ones(len(places), bool)
        if there.all():
            return take(self._rows, self._order.rows(places))
        batch = {name: np.zeros((len(places), *column.shape), column.dtype) for name, column in self._rows[0].items()}
        if there.any():
            for name, column in take(self._rows, self._order.rows(places[there])).items():
                batch[name][there] = column
        return batch

    def origin(self, step: int, index: int) -> tuple[str, Rows, int | None]:
        """-> the source of a row ("": the only one), its rows, and which of them it is; None: an empty row."""
        place = step * self.global_batch_size + index
        if self.num_batches and place >= len(self._rows):
            return "", self._rows, None
        return "", self._rows, int(self._order.rows(np.array([place]))[0])

    def shape(self, step: int) -> tuple[int, int]:
        """Rows, and tokens of a row, at this step: always the same."""
        return self.global_batch_size, self._row_length

    @functools.cached_property
    def _row_length(self) -> int:
        return len(self._rows[0]["weights"])

    def shapes_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Those that the batches of steps `start` to `stop` have, each once."""
        return [self.shape(start)] if start < stop else []

    def tokens(self, step: int) -> int:
        """Tokens in all batches before this step."""
        return step * math.prod(self.shape(step))

    def epochs(self, step: int) -> dict[str, float]:
        """How often all rows were gone through before this step."""
        return {"": step * self.global_batch_size / len(self._rows)}


def take(rows: Rows, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Several rows at once, each array with one dimension more."""
    if method := getattr(rows, "take", None):
        return method(numbers)
    chosen = [rows[number] for number in numbers.tolist()]
    return {name: np.stack([row[name] for row in chosen]) for name in chosen[0]}


class prefetch(Iterator[tuple[int, Any, float]]):
    """Iterate over `(step, place(step, batches), seconds waited)`, prepared up to `depth` steps ahead on one thread.

    Exactly the `num_steps` steps from `start_step` on are placed, in order; an error in `place` is raised here, at its
    step. Use it in a `with` statement, or call `close()`: that ends the thread after the step it is in. `place` runs on
    another thread than the caller: thread-local settings, such as JAX's mesh context, do not reach it.
    """

    def __init__(self, batches: Any, start_step: int, num_steps: int, place: Callable[[int, Any], Any],
                 depth: int):
        import grain

        steps = grain.MapDataset.range(start_step, start_step + num_steps)
        # One thread: two would place steps out of order, which collectives and a filling device memory do not forgive.
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=depth)
        placed = steps.map(lambda step: (step, place(step, batches)))
        self._placed = iter(placed.to_iter_dataset(options))
        self._placed.start_prefetch()

    def __next__(self) -> tuple[int, Any, float]:
        start = time.perf_counter()
        try:
            step, batch = next(self._placed)
        except BaseException:
            self.close()  # going on behind an error would leave out a step
            raise
        return step, batch, time.perf_counter() - start

    def close(self) -> None:
        """Drop what was prepared, and end the thread."""
        self._placed.close()

    def __enter__(self) -> "prefetch":
        return self

    def __exit__(self, *error) -> None:
        self.close()
