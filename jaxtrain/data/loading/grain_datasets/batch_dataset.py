"""Batches as a Grain dataset, which Grain prefetches on a thread or makes in worker processes.

Importing this module imports Grain: a run does so while the device computes its first step.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import grain
import numpy as np
from absl import flags
from grain.experimental import ThreadPrefetchIterDataset

from jaxtrain.data.loading.batch_source import BatchSource, of_process
from jaxtrain.errors import UserError


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
        return of_process(self.source, step, self._which)

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


def placed_ahead(batches: BatchDataset, start: int, stop: int, place: Callable[[int, Any], Any], depth: int,
                 workers: int = 0) -> grain.DatasetIterator:
    """Return Grain's iterator of `place(step, batch)` of these steps, in order, which has begun to prepare the first.

    Args:
        place: called on a thread of Grain's.
        depth: how many batches are placed ahead.
        workers: processes that read batches, each of which holds two or three; 0: the thread that places them.
    """
    # One thread: two could place steps out of order, which breaks collectives and can exhaust the device memory.
    if not workers:
        placed = batches.map_with_index(place)[start:stop].to_iter_dataset(
            grain.ReadOptions(num_threads=1, prefetch_buffer_size=depth), allow_nones=True)
    else:
        read_flags()
        _can_be_sent(batches)
        alone = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        read = batches[start:stop].to_iter_dataset(alone).mp_prefetch(
            grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=1), worker_init_fn=_as_worker)
        placed = ThreadPrefetchIterDataset(
            read.map(_copied).map_with_index(lambda n, batch: place(start + n, batch)), prefetch_buffer_size=depth)
    found = iter(placed)
    found.start_prefetch()
    return found


def _can_be_sent(batches: BatchDataset) -> None:
    """Refuse batches that cannot be pickled, before a worker process is begun."""
    try:
        cloudpickle.dumps(batches)
    except UserError:
        raise
    except Exception as error:
        raise UserError("data.workers", "the batches given by data= cannot be sent to worker processes "
                        f"({type(error).__name__}: {error})", "leave it out, or have them made of what can be pickled"
                        ) from None


def _copied(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a batch outside of the memory that is shared with a worker, so that this is free again at once."""
    return {name: np.array(column) for name, column in batch.items()}


def read_flags() -> None:
    """Have absl's flags count as read: Grain asks for some of them where it begins worker processes."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def _as_worker(number: int, workers: int) -> None:
    """Prepare a worker process: without accelerators, without signals that are meant for the run, and not alone."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    for each in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a launcher: the run ends its workers when it stops
        signal.signal(each, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_run, daemon=True).start()


def _end_with_the_run() -> None:
    """Wait until the process that trains has ended, which may have been killed, and end this one."""
    run = multiprocessing.parent_process()
    assert run is not None
    run.join()
    os._exit(1)
