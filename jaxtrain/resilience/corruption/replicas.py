"""Detect silent data corruption by comparing replicas: devices that hold the same data must hold the same bits.

Every few steps, and before each save, every device hashes its own part of the state. The hashes are read some steps
later, when they are long finished, and at the same step in all processes, so that all stop together.
"""

import collections
from typing import Any

import jax
import numpy as np

from jaxtrain.base.annotations import PyTree
from jaxtrain.resilience.corruption.device_hashes import DeviceHashes
from jaxtrain.resilience.corruption.suspects import SuspectDevices

LAG = 3  # steps until hashes are read: one more than may be in flight, so nothing waits for them


class Replicas:
    """Compares the replicas of one state; in a multi-process run every process makes all calls, at the same steps."""

    def __init__(self, abstract: PyTree, every: int, accusations: SuspectDevices,
                 compiled: jax.stages.Compiled | None = None):
        """Compile the check for states like `abstract`, whose leaves carry shardings, unless it is `compiled`.

        Does nothing if there are no replicas or `every` is 0. The compiled program reads the state once.
        """
        self._first = _first_holders(abstract)
        self._every, self._accusations = every, accusations
        self._hashes = DeviceHashes(abstract, compiled) if every and has_copies(abstract) else None
        self._unread: collections.deque[tuple[int, jax.Array]] = collections.deque()  # steps and their hashes

    def check(self, step: int, state: PyTree, now: bool = False) -> None:
        """Check the state; call it after every step, before the state is donated, with `now` before a save.

        Raises:
            Corrupted: replicas of this state (with `now`), or of one some steps ago, differ.
        """
        if self._hashes is None:
            return
        if now or step % self._every == 0:
            # It reads this state and the next step donates it, so in all processes this runs between the two.
            self._unread.append((step, self._hashes(state)))
        while self._unread and (now or self._unread[0][0] <= step - LAG):
            self._compare(self._hashes, *self._unread.popleft())

    def _compare(self, names: DeviceHashes, step: int, hashes: Any) -> None:
        """Accuse the devices that differ from the majority of those with the same piece, or all if there is none."""
        hashes = jax.device_get(hashes)
        differ = (hashes != np.take_along_axis(hashes, self._first, axis=0)).any(axis=0)
        if not differ.any():
            return
        wrong, outvoted = np.zeros(hashes.shape, bool), True
        for leaf in np.flatnonzero(differ):
            piece = self._first[:, leaf]
            ballots = np.stack([piece, hashes[:, leaf]], axis=1)
            _, ballot, votes = np.unique(ballots, axis=0, return_inverse=True, return_counts=True)
            minority = wrong[:, leaf] = 2 * votes[ballot.ravel()] <= np.bincount(piece)[piece]
            outvoted &= bool(np.isin(piece[minority], piece[~minority]).all())
        devices, leaves = names.named(wrong)
        more = f" and {len(leaves) - 1} others" if len(leaves) > 1 else ""
        what = f"{leaves[0]}{more} differ between devices that hold the same after step {step}"
        raise self._accusations.accuse(devices, what, step=step, leaves=leaves[:8], outvoted=outvoted,
                                       found_by="replicas")


def has_copies(abstract: PyTree) -> bool:
    """Return whether any device holds what another one holds too."""
    first = _first_holders(abstract)
    return bool((first != np.arange(len(first))[:, None]).any())


def _first_holders(abstract: PyTree) -> np.ndarray:
    """Return the first device that holds the same piece, for each [device, leaf]."""
    def of(leaf: jax.ShapeDtypeStruct) -> list[int]:
        first: dict[str, int] = {}
        pieces = leaf.sharding.devices_indices_map(leaf.shape).values()  # in the order of the mesh's devices
        return [first.setdefault(str(piece), i) for i, piece in enumerate(pieces)]

    return np.stack([of(leaf) for leaf in jax.tree.leaves(abstract)], axis=1)
