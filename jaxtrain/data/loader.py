"""Batches by step number, and a thread that prepares the next ones while the device computes.

Grain gives the order: a seeded permutation of all rows, another one in each epoch, at any place in O(1). The step
number alone says which rows a batch holds, so a restart needs no state, and processes need not agree on anything.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np

from jaxtrain.data.ahead import Ahead
from jaxtrain.errors import UserError


class Rows(Protocol):
    """Random access to rows: dicts of arrays with the same names, shapes and dtypes, among them `weights`."""

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
        import grain  # a second's import, that only a run which reads data pays

        if seed < 0:
            raise UserError("data.seed", f"{seed} is negative", "use 0 or more")
        order = grain.MapDataset.source(cast(Any, rows)).seed(seed)
        order = order.shuffle() if shuffle else order
        self._order = order.repeat() if repeat else order  # shuffle before repeat: each epoch is a permutation
        self._pad = None if repeat else {name: np.zeros_like(column) for name, column in rows[0].items()}
        self._ahead = Ahead(self._row, threads) if threads else None
        self.global_batch_size = global_batch_size
        self.num_batches = None if repeat else -(-len(rows) // global_batch_size)  # None: no end

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return self.rows(step, range(self.global_batch_size))

    def rows(self, step: int, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Only these rows of the global batch at `step`: what one process reads of it."""
        if step < 0 or (self.num_batches is not None and step >= self.num_batches):
            raise IndexError(f"batch {step} of {self.num_batches}")
        indices = [int(index) for index in indices]
        chosen = self._ahead.rows(step, indices) if self._ahead else [self._row(step, index) for index in indices]
        return {name: np.stack([row[name] for row in chosen]) for name in chosen[0]}

    def _row(self, step: int, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < self.global_batch_size:
            raise IndexError(f"row {index} of a batch of {self.global_batch_size}")
        place = int(step) * self.global_batch_size + index
        inside = self._pad is None or place < len(self._order)
        return cast(dict, self._order[place] if inside else self._pad)


class prefetch(Iterator[tuple[int, Any, float]]):
    """Iterate over `(step, place(step, batches), seconds waited)`, prepared up to `depth` steps ahead on one thread.

    Exactly the `num_steps` steps from `start_step` on are placed, in order; an error in `place` is raised here, at its
    step. Use it in a `with` statement, or call `close()`: that ends the thread after the step it is in. `place` runs on
    another thread than the caller: thread-local settings, such as JAX's mesh context, do not reach it.
    """

    def __init__(self, batches: Batches, start_step: int, num_steps: int, place: Callable[[int, Batches], Any],
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
