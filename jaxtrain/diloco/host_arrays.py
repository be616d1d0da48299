"""Arrays of trees that live on a mesh, brought to the host as they are asked for, changed there, and put back."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain.base.annotations import PyTree
from jaxtrain.diloco.fragments import Fragment, flat, put

PART = 2**26  # bytes that are sent to the other processes at a time


class HostArrays:
    """Whole arrays in the memory of every process; every process makes all calls, in the same order."""

    def __init__(self, trees: Mapping[str, PyTree]):
        """Bring nothing yet. `trees`: by name, all of one structure."""
        self._leaves = {name: jax.tree.leaves(tree) for name, tree in trees.items()}
        self._structure = {name: jax.tree.structure(tree) for name, tree in trees.items()}
        self._hosted: dict[str, dict[int, np.ndarray]] = {name: {} for name in trees}
        self._changed: set[tuple[str, int]] = set()

    def get(self, name: str, fragment: Fragment) -> np.ndarray:
        """Return a fragment as one vector of float32."""
        return flat(fragment, self._brought(name, fragment))

    def set(self, name: str, fragment: Fragment, vector: np.ndarray) -> None:
        """Change a fragment."""
        put(fragment, self._brought(name, fragment), vector)
        self._changed |= {(name, piece.leaf) for piece in fragment}

    def trees(self) -> dict[str, PyTree]:
        """Return the trees on the mesh, with what was changed."""
        with jax.transfer_guard("allow"):
            leaves = {name: [_placed(self._hosted[name][i], leaf) if (name, i) in self._changed else leaf
                             for i, leaf in enumerate(leaves)] for name, leaves in self._leaves.items()}
        return {name: jax.tree.unflatten(self._structure[name], found) for name, found in leaves.items()}

    def _brought(self, name: str, fragment: Fragment) -> Any:
        hosted = self._hosted[name]
        with jax.transfer_guard("allow"):
            for piece in fragment:
                if piece.leaf not in hosted:
                    hosted[piece.leaf] = _whole(self._leaves[name][piece.leaf])
        return hosted


def of_first(vector: np.ndarray) -> np.ndarray:
    """Return the vector of the first process; every process makes this call, with one of the same size.

    It goes over the network of the devices in parts, each of which every device holds: the whole may be a model.
    """
    if jax.process_count() == 1:
        return vector
    found, many = np.empty_like(vector), PART // vector.itemsize
    with jax.transfer_guard("allow"):
        for at in range(0, vector.size, many):
            found[at:at + many] = multihost_utils.broadcast_one_to_all(vector[at:at + many])
    return found


def _whole(leaf: jax.Array) -> np.ndarray:
    if leaf.is_fully_addressable:
        return np.array(leaf)
    return np.array(multihost_utils.process_allgather(leaf, tiled=True))


def _placed(host: np.ndarray, like: jax.Array) -> jax.Array:
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: host[index])
