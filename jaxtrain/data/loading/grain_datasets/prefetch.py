"""The iterator of the batches of a run, of which Grain prepares the next ones while the device computes."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxtrain.base.annotations import PyTree
from jaxtrain.data.loading.batch_source import BatchSource, of_process


class prefetch(Iterator[tuple[int, PyTree, float]]):
    """Iterate over `(step, place(step, batch), seconds waited)`; Grain prepares batches up to `depth` steps ahead.

    Exactly the steps from `start` to `stop` are read and placed, in order; an error in either is raised here, at its
    step. The first batch is read when it is asked for, without Grain, whose import then takes its time while the device
    computes. Use it in a `with` statement, or call `close()`. `place` runs on another thread than the caller:
    thread-local settings, such as JAX's mesh context, do not apply there.
    """

    def __init__(self, batches: BatchSource, start: int, stop: int, place: Callable[[int, PyTree], PyTree], depth: int,
                 *, rows: Mapping[int, Sequence[int]] | None = None, workers: int = 0):
        """Read nothing yet.

        Args:
            rows: which rows of a batch of so many are read, those that one of several processes needs; None: all.
            workers: processes that read batches; 0: the thread that places them.
        """
        self._batches, self._rows, self._place, self._depth, self._workers = batches, rows, place, depth, workers
        self._next, self._stop, self._first, self._closed = start, stop, True, False
        self._placed: Any = None  # Grain's iterator

    def __next__(self) -> tuple[int, PyTree, float]:
        began, step = time.perf_counter(), self._next
        if self._closed:
            raise RuntimeError("it is closed")
        if step >= self._stop:
            raise StopIteration
        try:
            if self._first:
                batch = self._place(step, of_process(self._batches, step, self._rows))
            else:
                self.begin()
                batch = next(self._placed)
        except BaseException:
            self.close()  # continuing after an error would skip a step
            raise
        self._next, self._first = step + 1, False
        return step, batch, time.perf_counter() - began

    def begin(self) -> None:
        """Begin to prepare batches ahead, once the first one was given; otherwise the call for the second one does."""
        if self._placed is None and not self._first and self._next < self._stop:
            from jaxtrain.data.loading.grain_datasets.batch_dataset import BatchDataset, placed_ahead

            self._placed = placed_ahead(BatchDataset(self._batches, self._rows), self._next, self._stop, self._place,
                                        self._depth, self._workers)

    def close(self) -> None:
        """Drop the prepared batches, and end the thread and the processes."""
        self._closed = True
        if self._placed is not None:
            self._placed.close()
            self._placed = None
            if self._workers:  # the end of their batches has tracebacks, which hold memory that is shared with them
                gc.collect()

    def __enter__(self) -> "prefetch":
        return self

    def __exit__(self, *error) -> None:
        self.close()
