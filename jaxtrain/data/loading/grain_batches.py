"""Batches as a Grain dataset, which Grain prefetches on a thread or makes in worker processes.

Importing this module imports Grain, so a run does so while its step is compiled, and `import jaxtrain` never.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grain
import jax
import numpy as np
from grain.experimental import ThreadPrefetchIterDataset

from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.placement import Where, own_rows, place_rows


class BatchDataset(grain.MapDataset):
    """A `grain.MapDataset` of the batches of a source: element n is the batch of step n.

    What the source knows of its batches without reading them, such as `shapes_of`, is here too.
    """

    def __init__(self, source: BatchSource, rows: Mapping[int, Sequence[int]] | None = None):
        """`rows`: which rows of a batch of so many are read, those that one of several processes needs; None: all."""
        super().__init__(getattr(source, "parents", ()))
        self.source, self._which = source, rows

    def __len__(self) -> int:
        """Return the number of batches; without an end, as many as a dataset of Grain's own that is repeated."""
        return sys.maxsize if self.source.num_batches is None else self.source.num_batches

    def __getitem__(self, step):
        """Return the batch of this step, or the dataset of these steps."""
        if isinstance(step, slice):
            return self.slice(step)
        return self.source[step] if self._which is None else self.source.rows(step, self._which[self.source.shape(step)[0]])

    @property
    def num_batches(self) -> int | None:
        """The number of batches; None: endless."""
        return self.source.num_batches

    def rows(self, step: int, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return only these rows of the batch of this step."""
        return self.source.rows(step, indices)

    def shape(self, step: int) -> tuple[int, int]:
        """Return the number of rows, and of tokens per row, at this step."""
        return self.source.shape(step)

    def shapes_of(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the distinct shapes that the batches of steps `start` to `stop` may have."""
        return self.source.shapes_of(start, stop)

    def tokens(self, step: int) -> int:
        """Return the number of tokens in all batches before this step."""
        return self.source.tokens(step)

    def epochs(self, step: int) -> dict[str, float]:
        """Return the number of epochs over each named source before this step."""
        return self.source.epochs(step)


class prefetch(Iterator[tuple[int, Any, float]]):
    """Iterate over `(step, place(step, batch), seconds waited)`, prepared up to `depth` steps ahead by Grain.

    Exactly the steps from `start` to `stop` are read and placed, in order; an error in either is raised here, at its
    step. Use it in a `with` statement, or call `close()`. `place` runs on another thread than the caller: thread-local
    settings, such as JAX's mesh context, do not apply there.
    """

    def __init__(self, batches: grain.MapDataset, start: int, stop: int, place: Callable[[int, Any], Any], depth: int,
                 workers: int = 0):
        """`workers`: processes that read batches, each of which holds two or three; 0: the thread that places them."""
        self._steps = iter(range(start, stop))
        # One thread: two could place steps out of order, which breaks collectives and can exhaust the device memory.
        if not workers:
            placed = batches.map_with_index(place)[start:stop].to_iter_dataset(
                grain.ReadOptions(num_threads=1, prefetch_buffer_size=depth), allow_nones=True)
        else:
            alone = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
            read = batches[start:stop].to_iter_dataset(alone).mp_prefetch(
                grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=1), worker_init_fn=_on_cpu)
            placed = ThreadPrefetchIterDataset(
                read.map_with_index(lambda n, batch: place(start + n, batch)), prefetch_buffer_size=depth)
        self._placed = iter(placed)
        self._placed.start_prefetch()

    def __next__(self) -> tuple[int, Any, float]:
        began = time.perf_counter()
        try:
            batch = next(self._placed)
        except StopIteration:
            raise
        except BaseException:
            self.close()  # continuing after an error would skip a step
            raise
        return next(self._steps), batch, time.perf_counter() - began

    def close(self) -> None:
        """Drop the prepared batches, and end the thread and the processes."""
        self._steps = iter(())
        self._placed.close()

    def __enter__(self) -> "prefetch":
        return self

    def __exit__(self, *error) -> None:
        self.close()


def _on_cpu(number: int, workers: int) -> None:
    """Keep a worker process away from accelerators, which belong to the process that trains."""
    os.environ["JAX_PLATFORMS"] = "cpu"


def placed_ahead(batches: BatchSource, start: int, stop: int, where: Where, check: Callable[[Any], Any], depth: int,
                 workers: int = 0) -> prefetch:
    """Iterate over the batches of these steps on the mesh; each process reads only the rows that its devices hold."""
    several = jax.process_count() > 1
    rows = {size: own_rows(size, where) for size, _ in batches.shapes_of(start, stop)} if several else None

    def place(step: int, local: Any) -> dict[str, jax.Array]:
        return place_rows(local, batches.shape(step)[0] if several else 0, where, check)

    return prefetch(BatchDataset(batches, rows), start, stop, place, depth, workers)
