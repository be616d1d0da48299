"""Batches as a Grain dataset, which Grain prefetches on a thread or makes in worker processes.

Importing this module imports Grain: a run does so while the device computes its first step.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
from grain.experimental import ThreadPrefetchIterDataset

from jaxtrain.base.annotations import PyTree
from jaxtrain.data.loading.batch_source import BatchSource, of_process


class BatchDataset(grain.MapDataset):
    """A `grain.MapDataset` of the batches of a source: element n is the batch of step n.

    What the source knows of its batches without reading them, such as `shapes_of`, is here too.
    """

    def __init__(self, source: BatchSource, rows: Mapping[int, Sequence[int]] | None = None):
        """`rows`: which rows of a batch of so many are read, those that one of several processes needs; None: all."""
        super().__init__(getattr(source, "parents", ()))
        self.batch_source, self._rows = source, rows

    def __len__(self) -> int:
        """Return the number of batches; without an end, as many as a dataset of Grain's own that is repeated."""
        return sys.maxsize if self.batch_source.num_batches is None else self.batch_source.num_batches

    def __getitem__(self, index: int | slice) -> Any:
        """Return the batch of this step, or the dataset of these steps."""
        return self.slice(index) if isinstance(index, slice) else of_process(self.batch_source, index, self._rows)

    def __getattr__(self, name: str) -> Any:
        """Return what the source has: `num_batches`, `rows`, `shape`, `shapes_of`, `tokens` and `epochs`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.__dict__["batch_source"], name)


def placed_ahead(batches: BatchDataset, start: int, stop: int, place: Callable[[int, PyTree], PyTree], depth: int,
                 workers: int = 0) -> grain.DatasetIterator:
    """Return Grain's iterator of `place(step, batch)` of these steps, in order, which has begun to prepare the first.

    Args:
        place: called on a thread of Grain's.
        depth: how many batches are placed ahead.
        workers: processes that read batches; 0: the thread that places them.
    """
    # One thread: two could place steps out of order, which breaks collectives and can exhaust the device memory.
    if workers:
        from jaxtrain.data.loading.grain_datasets.workers import read_by_workers

        placed = ThreadPrefetchIterDataset(read_by_workers(batches[start:stop], workers).map_with_index(
            lambda n, batch: place(start + n, batch)), prefetch_buffer_size=depth)
    else:
        placed = batches.map_with_index(place)[start:stop].to_iter_dataset(
            grain.ReadOptions(num_threads=1, prefetch_buffer_size=depth), allow_nones=True)
    found = iter(placed)
    found.start_prefetch()
    return found
