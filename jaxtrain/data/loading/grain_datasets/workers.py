"""Worker processes of Grain that read batches (`data.workers`): what is sent to them, and how they begin and end."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cloudpickle
import grain
import numpy as np
from absl import flags

from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.schema import DataConfig
from jaxtrain.config.sections.diloco_keys import DilocoConfig
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.batch_spec import Array
from jaxtrain.data.loading.configured import configured_batches, configured_corpus
from jaxtrain.errors import UserError


def read_by_workers(batches: grain.MapDataset, workers: int) -> grain.IterDataset:
    """Return the batches in their order, read by processes that hold two or three each."""
    read_flags()
    _can_be_sent(batches)
    read = batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)).mp_prefetch(
        grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=1), worker_init_fn=_as_worker)
    return read.map(_copied)


def read_flags() -> None:
    """Have absl's flags count as read: Grain asks for some of them where it begins worker processes."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


class ForWorkers:
    """A batch source that a worker process makes anew from the config, rather than receive what this one has read."""

    def __init__(self, model: ModelConfig, data: DataConfig, diloco: DilocoConfig, arrays: Mapping[str, Array],
                 source: BatchSource | None = None):
        """`source`: the config's batches, where they are made already."""
        self._sections, self._arrays = (model, data, diloco), arrays
        self._source = source if source is not None else configured_batches(
            model, data, diloco, configured_corpus(model, data), arrays)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_source"], name)

    def __getitem__(self, step: int) -> Any:
        return self._source[step]

    def __reduce__(self):
        return ForWorkers, (*self._sections, {name: replace(array, dtype=np.dtype(array.dtype))
                                              for name, array in self._arrays.items()})


def _can_be_sent(batches: grain.MapDataset) -> None:
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
