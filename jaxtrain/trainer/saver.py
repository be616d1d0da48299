"""The one place that saves: checkpoints on disk, copies in memory, and what is written about each."""

import time
from collections.abc import Callable

from jaxtrain.base.annotations import Json, JsonMapping, JsonObject
from jaxtrain.checkpoint import CheckpointManager, LocalCheckpoints
from jaxtrain.checkpoint.save_policy import SavePolicy
from jaxtrain.data.loading.skipped_batches import SkippedBatches
from jaxtrain.observe import MetricsWriter
from jaxtrain.observe.ledger import Ledger
from jaxtrain.train_step.state import TrainState


class Saver:
    """Saves to whichever tier is due. Every process makes all calls, at the same steps."""

    def __init__(self, checkpoints: CheckpointManager, local: LocalCheckpoints, policy: SavePolicy,
                 writer: MetricsWriter, ledger: Ledger, about: JsonMapping, skipped: SkippedBatches,
                 data_state: Callable[[int], Json] | None = None):
        """`about`: what every checkpoint says of its run; `data_state`: the state of data that are read in order."""
        self._checkpoints, self._local, self._policy = checkpoints, local, policy
        self._writer, self._ledger = writer, ledger
        self._about = {**about, "skipped_batches": skipped.to_dict()}
        self._meta: JsonObject = {}
        self._data_state = data_state

    def due(self, step: int, *, last: bool) -> bool:
        """Whether anything is saved after this step. `last`: no step follows in this process."""
        self._to_disk = last or self._policy.due(step)
        return self._to_disk or self._local.due(step)

    def save(self, step: int, state: TrainState) -> None:
        """Save what is due; the metrics must have been flushed."""
        self._meta = {**self._about, **self._writer.last, "step": step, "time": time.time(),
                      "goodput": self._ledger.goodput()}
        if self._data_state:
            self._meta["data_state"] = self._data_state(step)
        if self._to_disk:
            with self._policy.taking():
                self._checkpoints.save(step, state, self._meta)
        elif not self._writer.behind:  # only process 0 can be behind; without its part nobody restores this copy
            self._local.take(step, state, self._meta)

    def finish(self, step: int, state: TrainState, pause: Callable[[float], bool]) -> None:
        """Wait until the last step's checkpoint is read back, and repeat a save that failed."""
        self._checkpoints.insist(step, state, self._meta, pause)

    def pop_fields(self) -> dict[str, float]:
        """Return what the next line of metrics says about saves."""
        return {**self._policy.pop_fields(), **self._local.pop_fields()}
