"""Grain datasets of the user's, given as `data=`: a MapDataset by the step, an IterDataset with a state to resume from.

Both yield whole batches. Each process reads whole batches too, and keeps the rows that its devices hold, so a run may
resume on another number of processes; a dataset must not be sharded by process.
"""

import json
import sys
import threading
from typing import Any

from jaxtrain.base import arguments
from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.loading.batch_function import BatchFunction
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.errors import UserError

KEPT = 1100  # newest states of an iterator that are kept: of more batches than data.prefetch may prepare ahead


def as_batch_source(data: Any) -> BatchSource:
    """Return what was given as `data=` as a batch source, or refuse it."""
    grain: Any = sys.modules.get("grain")  # who gives a dataset has imported it
    if grain is None or arguments.has_batches(data):
        arguments.is_batch_source(data)
        return data
    if isinstance(data, grain.MapDataset):
        return MapDatasetBatches(data)
    if isinstance(data, grain.IterDataset):
        return IterDatasetBatches(data)
    if isinstance(data, grain.DatasetIterator):
        raise UserError("data", "it is an iterator of a Grain dataset, which one run would use up",
                        "give the dataset itself")
    if isinstance(data, grain.DataLoader):
        raise UserError("data", "it is a grain.DataLoader, which reads for one process", "give a grain.MapDataset, "
                        "such as grain.MapDataset.source(source).seed(0).shuffle().repeat().batch(8)")
    arguments.is_batch_source(data)
    return data


class MapDatasetBatches(BatchFunction):
    """The batch source of a `grain.MapDataset` of batches: the batch of step n is its element n."""

    gives = "the grain.MapDataset gives"

    def __init__(self, dataset: Any):
        if not len(dataset):
            raise UserError("data", "the grain.MapDataset is empty", "give one with a batch for each step")
        super().__init__(dataset.__getitem__, num_batches=None if len(dataset) == sys.maxsize else len(dataset),
                         identity=_described(dataset))
        self.parents = dataset,


class IterDatasetBatches(BatchFunction):
    """The batch source of a `grain.IterDataset` of batches: the batch of step n is the one that n others come before.

    A checkpoint has the state of its iterator, with which a run resumes. A step behind the one that was read last is
    read again, from the newest state before it that is known.
    """

    gives = "the grain.IterDataset gives"

    def __init__(self, dataset: Any):
        super().__init__(self._at, identity=_described(dataset))
        self.parents, self._dataset, self._next = (), dataset, 0
        self._iterator: Any = None
        self._states: dict[int, str] = {}  # as JSON, by the number of batches before
        self._first: Any = None  # the batch of step 0
        self._last: tuple[int, Any] = (-1, None)
        self._lock = threading.RLock()  # the first batches are read on another thread than those prepared ahead

    def __reduce__(self):
        raise UserError("data.workers", "a grain.IterDataset is read in order", "leave it out, and give the dataset "
                        "workers of its own by mp_prefetch(grain.MultiprocessingOptions(num_workers=4))")

    def state(self, step: int) -> JsonObject:
        """Return the state of the iterator before the batch of this step, which must have been read lately."""
        with self._lock:
            if self._iterator is None:
                self._at(0)
            return json.loads(self._now() if step == self._next else self._states[step])

    def restore(self, step: int, state: JsonObject) -> None:
        """Go on with the batch of this step, by the state that a checkpoint has."""
        with self._lock:
            self._at(0)  # of which the shape and the arrays are asked for
            self._states, self._last = {step: json.dumps(state)}, (-1, None)
            self._go_back(step)

    def _at(self, step: int) -> Any:
        with self._lock:
            if step == 0 and self._first is not None:
                return self._first
            if step != self._last[0]:
                if step < self._next or self._iterator is None:
                    self._go_back(step)
                while self._next <= step:
                    self._last = self._next, self._draw()
            if step == 0:
                self._first = self._last[1]
            return self._last[1]

    def _draw(self) -> Any:
        self._states[self._next] = self._now()
        if len(self._states) > KEPT:
            del self._states[next(iter(self._states))]
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise UserError("data", f"the grain.IterDataset ends after {self._next} batches, before the run does",
                            "let it repeat, or lower train.steps") from None
        self._next += 1
        return batch

    def _go_back(self, step: int) -> None:
        """Place the iterator before this step, as near as a known state is."""
        iterator = self._begin() if self._iterator is None else self._iterator
        if min(self._states) > step:  # before all states that are kept
            iterator.close()
            iterator = self._begin()
        begin = max(known for known in self._states if known <= step)
        self._states = {number: state for number, state in self._states.items() if number <= begin}
        self._next = begin
        try:
            iterator.set_state(json.loads(self._states[begin]))
        except Exception as error:  # of a dataset that was changed
            raise UserError("data", f"the grain.IterDataset cannot go on from its state at step {begin} "
                            f"({type(error).__name__}: {error})", "give the dataset that the run began with") from error

    def _begin(self) -> Any:
        from jaxtrain.data.loading.grain_datasets.workers import read_flags

        read_flags()  # it may have worker processes
        self._iterator = iter(self._dataset)
        self._states = {0: self._now()}
        return self._iterator

    def _now(self) -> str:
        """Return the iterator's present state as JSON, which also keeps it from changing."""
        try:
            return json.dumps(self._iterator.get_state(), default=lambda number: number.item())
        except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
            raise UserError("data", f"the state of its iterator is not plain JSON ({error}), and no checkpoint can "
                            "hold it", "give a dataset of Grain's own transformations, or a MapDataset") from None


def _described(dataset: Any) -> list[str]:
    """Return the names of a dataset's transformations, which tell it from others."""
    found, left = [], [dataset]
    while left:
        found.append(type(left[0]).__name__)
        left = [*left[1:], *left[0].parents]
    return found
