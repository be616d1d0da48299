"""What each device really holds, as one number an array: a hash of its own copy or piece, read by the device itself."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.sharding.host_memory import HOST, fetched

Hashes = Callable[[Any], jax.Array]
MOST_LAYERS = 1024


def compile_hashes(tree: Any) -> Hashes:
    """tree -> uint32 [devices, leaves], devices in the order of `devices_of`, the same in every process.

    For trees like this one, which may be abstract; its leaves know their shardings.

    Inside the `shard_map` nothing says that two devices hold the same, so no compiler can read one copy for both.
    """
    leaves = jax.tree.leaves(tree)
    mesh = leaves[0].sharding.mesh
    away = [i for i, leaf in enumerate(leaves) if leaf.sharding.memory_kind == HOST]
    here = [i for i in range(len(leaves)) if i not in away]
    each = P(mesh.axis_names)

    def hashed(which, arrays, first=0):
        def own(arrays, first):
            return jnp.stack([hash_bits(x, first) for x in arrays])[None]

        specs = [leaves[i].sharding.spec for i in which]
        return jax.shard_map(own, mesh=mesh, in_specs=(specs, P()), out_specs=each, check_vma=False)(
            arrays, jnp.uint32(first))

    def in_pieces(i, x):
        """Of an array in the hosts' memory: layer by layer, if its first dimension is of layers, so that one is fetched
        at a time (jaxtrain/train_step/offload.py says why in a loop).
        """
        if x.ndim < 2 or x.shape[0] > MOST_LAYERS or (*leaves[i].sharding.spec, None)[0] is not None:
            return hashed([i], [fetched(x)])
        none = jnp.zeros_like(hashed([i], [fetched(jax.lax.slice_in_dim(x, 0, 1))]))
        return jax.lax.fori_loop(0, x.shape[0], lambda at, sums: sums + hashed(
            [i], [fetched(jax.lax.dynamic_slice_in_dim(x, at, 1))], at), none)

    def hashes(tree):
        every = jax.tree.leaves(tree)
        columns = jnp.concatenate(
            [hashed(here, [every[i] for i in here]), *(in_pieces(i, every[i]) for i in away)], 1)
        gathered = jax.shard_map(  # all at once: XLA for CPU can wait for ever in collectives that may run side by side
            lambda rows: jax.lax.all_gather(rows, mesh.axis_names, tiled=True), mesh=mesh, in_specs=each, out_specs=P(),
            check_vma=False)(columns)
        return gathered[:, np.argsort([*here, *away])]

    return jax.jit(hashes).lower(tree).compile()


def devices_of(tree: Any) -> list[jax.Device]:
    """Those of the mesh that a tree lives on."""
    return list(jax.tree.leaves(tree)[0].sharding.mesh.devices.flat)


def paths_of(tree: Any) -> list[str]:
    """A name for each leaf."""
    return [jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


@jax.jit  # so that leaves of one shape are traced once
def hash_bits(x: jax.Array, first: jax.Array | int = 0) -> jax.Array:
    """One uint32 that changes with every single bit of `x`, and but for one chance in 2^32 with any other change.

    Each word is mixed with its place before all are summed. A sum of words times places would not do: there two flipped
    signs cancel, wherever they are. A part that stands at `first` of the first dimension gives its part of the sum.
    """
    words = x if x.dtype == bool else jax.lax.bitcast_convert_type(x, f"uint{min(8 * x.dtype.itemsize, 32)}")
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):  # not reshaped to one dimension, which would copy it on some devices
        begin = jnp.uint32(0 if axis else first)
        place = place * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) + begin
    mixed = words.astype(jnp.uint32) + place * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)
