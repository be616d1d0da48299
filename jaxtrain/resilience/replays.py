"""A step that runs twice must give the same bits twice. What replicas cannot show, an error that all of them got from
one device through a sum, shows here; it costs a step and a copy of the state."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.resilience.accusations import Accusations
from jaxtrain.resilience.bits import Hashes, compile_hashes, devices_of, paths_of
from jaxtrain.resilience.replicas import LAG

Step = Callable[[Any, Any], tuple[Any, Any]]


class Replays:
    """Runs a step now and then once more. In a multi-process run every process makes all calls, at the same steps."""

    def __init__(self, every: int, accusations: Accusations):
        """`every` so many steps; 0: never."""
        self._every, self._accusations = every, accusations
        self._queue: collections.deque[tuple[int, jax.Array, jax.Array]] = collections.deque()
        self._hashes: Hashes | None = None
        self._paths: list[str] = []
        self._devices: list[jax.Device] = []

    def run(self, step: int, compiled: Step, state: Any, batch: Any) -> tuple[Any, Any]:
        """`compiled(state, batch)`, which leaves the state of `step`; the state is donated."""
        if not self._every or step % self._every:
            return compiled(state, batch)
        with jax.transfer_guard("allow"):  # compiling the first time
            copy = _copy(state)
            result = _named(compiled(state, batch))
            if self._hashes is None:
                self._hashes = compile_hashes(result)
                self._paths, self._devices = paths_of(result), devices_of(result)
            first = self._hashes(result)
            again = self._hashes(_named(compiled(copy, batch)))
        self._queue.append((step, first, again))
        return result["state"], result["metrics"]

    def check(self, step: int, now: bool = False) -> None:
        """Call it after every step; `now` where the state is about to be saved.

        Raises:
            Corrupted: a step some steps ago (with `now`: or this one) gave other bits the second time.
        """
        while self._queue and (now or self._queue[0][0] <= step - LAG):
            at, first, again = self._queue.popleft()
            differs = np.asarray(jax.device_get(first)) != np.asarray(jax.device_get(again))
            if differs.any():
                devices = tuple(self._devices[i] for i in np.flatnonzero(differs.any(axis=1)))
                leaves = [self._paths[i] for i in np.flatnonzero(differs.any(axis=0))]
                what = f"step {at} run twice gave other bits, first in {leaves[0]} ({len(leaves)} arrays)"
                raise self._accusations.accuse(devices, what, step=at, leaves=leaves[:8], found_by="replay")


def _named(result: tuple[Any, Any]) -> dict[str, Any]:
    return {"state": result[0], "metrics": result[1]}


@jax.jit
def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)  # a jit that returned its arguments would return the same buffers
