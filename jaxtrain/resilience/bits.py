"""What each device really holds, as one number an array: a hash of its own copy or piece, read by the device itself."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.offload import fetched

Hashes = Callable[[Any], jax.Array]


def compile_hashes(tree: Any) -> Hashes:
    """tree -> uint32 [devices, leaves], devices in the order of `devices_of`, the same in every process.

    For trees like this one, which may be abstract; its leaves know their shardings.

    Inside the `shard_map` nothing says that two devices hold the same, so no compiler can read one copy for both.
    """
    mesh = jax.tree.leaves(tree)[0].sharding.mesh
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, tree)

    def own(tree):
        row = jnp.stack([hash_bits(leaf) for leaf in jax.tree.leaves(tree)])[None]
        return jax.lax.all_gather(row, mesh.axis_names, tiled=True)

    every = jax.shard_map(own, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
    return jax.jit(lambda tree: every(jax.tree.map(fetched, tree))).lower(tree).compile()


def devices_of(tree: Any) -> list[jax.Device]:
    """Those of the mesh that a tree lives on."""
    return list(jax.tree.leaves(tree)[0].sharding.mesh.devices.flat)


def paths_of(tree: Any) -> list[str]:
    """A name for each leaf."""
    return [jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


@jax.jit  # so that leaves of one shape are traced once
def hash_bits(x: jax.Array) -> jax.Array:
    """One uint32 that changes with every single bit of `x`, and but for one chance in 2^32 with any other change.

    Each word is mixed with its place before all are summed. A sum of words times places would not do: there two flipped
    signs cancel, wherever they are.
    """
    words = x if x.dtype == bool else jax.lax.bitcast_convert_type(x, f"uint{min(8 * x.dtype.itemsize, 32)}")
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):  # not reshaped to one dimension, which would copy it on some devices
        place = place * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    mixed = words.astype(jnp.uint32) + place * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)
