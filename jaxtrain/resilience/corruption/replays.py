"""Detect silent data corruption by running a step twice, which must give the same bits.

It finds errors that replicas cannot show because a reduction spread them from one device to all. It costs one step and
a copy of the state.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxtrain.base.annotations import PyTree
from jaxtrain.resilience.corruption.device_hashes import DeviceHashes
from jaxtrain.resilience.corruption.suspects import SuspectDevices
from jaxtrain.sharding.host_memory import copied
from jaxtrain.train_step.state import Metrics, TrainState

Step = Callable[[Any, Any], tuple[Any, Any]]


class Replays:
    """Repeats a step now and then; in a multi-process run every process makes all calls, at the same steps."""

    def __init__(self, every: int, accusations: SuspectDevices):
        """Repeat every `every`-th step; 0: never."""
        self._every, self._accusations = every, accusations
        self._hashes: DeviceHashes | None = None

    def run(self, step: int, compiled: Step, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Return `compiled(state, batch)`, which produces the state after `step`; the state is donated.

        Raises:
            Corrupted: the second run of the step gave different bits.
        """
        if not self._every or step % self._every:
            return compiled(state, batch)
        with jax.transfer_guard("allow"):  # compiles the first time
            copy = copied(state)
            result = compiled(state, batch)
            told = {"state": result[0], "metrics": result[1]}
            self._hashes = self._hashes or DeviceHashes(told)
            # Wait for one before starting the next: independent programs with collectives might start in a different
            # order on another process, which deadlocks.
            first = np.asarray(self._hashes(told))
            state, metrics = jax.block_until_ready(compiled(copy, batch))
            again = np.asarray(self._hashes({"state": state, "metrics": metrics}))
        if (differs := first != again).any():
            devices, leaves = self._hashes.named(differs)
            what = f"step {step} run twice gave different bits, first in {leaves[0]} ({len(leaves)} arrays)"
            raise self._accusations.accuse(devices, what, step=step, leaves=leaves[:8], found_by="replay")
        return result
