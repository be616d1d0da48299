"""Detect silent data corruption by comparing replicas: devices that hold the same data must hold the same bits.

Every few steps, and before each save, every device hashes its own part of the state. The hashes are read some steps
later, when they are long finished, and at the same step in all processes, so that all stop together.
"""

import collections
import threading
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxtrain.resilience.corruption.device_hashes import compile_hashes, devices_of, paths_of
from jaxtrain.resilience.corruption.suspects import SuspectDevices

LAG = 3  # steps until hashes are read: one more than may be in flight, so nothing waits for them


@dataclass(frozen=True)
class Disagreement:
    """A difference between devices that should hold the same data."""

    step: int
    leaves: tuple[str, ...]  # paths in the state
    devices: tuple[jax.Device, ...]  # those in the minority, or all if there is none
    outvoted: bool  # whether there is a majority against them

    def __str__(self) -> str:
        more = f" and {len(self.leaves) - 1} others" if len(self.leaves) > 1 else ""
        return f"{self.leaves[0]}{more} differ between devices that hold the same after step {self.step}"


class Replicas:
    """Compares the replicas of one state; in a multi-process run every process makes all calls, at the same steps."""

    def __init__(self, abstract: Any, every: int, accusations: SuspectDevices):
        """Compile the check for states like `abstract`, whose leaves carry shardings.

        Does nothing if there are no replicas or `every` is 0. The compiled program reads the state once.
        """
        self._paths, self._devices = paths_of(abstract), devices_of(abstract)
        # [devices, leaves]: the first device that holds the same piece.
        self._first = np.stack([_first_holder(leaf, self._devices) for leaf in jax.tree.leaves(abstract)], axis=1)
        has_copies = (self._first != np.arange(len(self._devices))[:, None]).any()
        self._every, self._accusations = every if has_copies else 0, accusations
        self._hashes = compile_hashes(abstract) if self._every else None
        self._queue: collections.deque[int] = collections.deque()  # steps whose hashes have not been acted on
        self._known: dict[int, jax.Array] = {}
        self._lock = threading.Lock()

    def check(self, step: int, state: Any, now: bool = False) -> None:
        """Check the state; call it after every step, before the state is donated, with `now` before a save.

        Raises:
            Corrupted: replicas of this state (with `now`), or of one some steps ago, differ.
        """
        if self._hashes is None:
            return
        if now or step % self._every == 0:
            with self._lock:
                # It reads this state and the next step donates it, so in all processes this runs between the two.
                self._known[step] = self._hashes(state)
                for old in sorted(self._known)[:-16]:
                    del self._known[old]
            self._queue.append(step)
        while self._queue and (now or self._queue[0] <= step - LAG):
            if wrong := self.verdict(self._queue.popleft()):
                raise self._accusations.accuse(wrong.devices, str(wrong), step=wrong.step, leaves=wrong.leaves[:8],
                                               outvoted=wrong.outvoted, found_by="replicas")

    def verdict(self, step: int) -> Disagreement | None:
        """Return what the check after `step` found, or None (also if there was no check); waits for it, on any thread.
        """
        with self._lock:
            hashes = self._known.get(step)
        return None if hashes is None else self._compare(step, np.asarray(jax.device_get(hashes)))

    def _compare(self, step: int, hashes: np.ndarray) -> Disagreement | None:
        wrong = (hashes != np.take_along_axis(hashes, self._first, axis=0)).any(axis=0)
        if not wrong.any():
            return None
        named, outvoted = set(), True
        for leaf in np.flatnonzero(wrong):
            for first in np.unique(self._first[:, leaf]):
                group = np.flatnonzero(self._first[:, leaf] == first)
                values, votes = np.unique(hashes[group, leaf], return_counts=True)
                if len(values) == 1:
                    continue
                majority = 2 * votes.max() > len(group)
                outvoted &= bool(majority)
                named |= set(group[hashes[group, leaf] != values[votes.argmax()]] if majority else group)
        devices = tuple(self._devices[i] for i in sorted(named))
        return Disagreement(step, tuple(self._paths[i] for i in np.flatnonzero(wrong)), devices, outvoted)


def _first_holder(leaf: Any, devices: list[jax.Device]) -> np.ndarray:
    where = leaf.sharding.devices_indices_map(leaf.shape)
    first: dict[Any, int] = {}
    pieces = [tuple(piece.indices(n) for piece, n in zip(where[device], leaf.shape, strict=True)) for device in devices]
    return np.array([first.setdefault(piece, i) for i, piece in enumerate(pieces)])
