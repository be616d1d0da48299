"""Hashes of what each device holds: one number per array, computed by the device from its own copy or piece."""

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
    """Compile a function from trees like this one to hashes, as uint32 [devices, leaves].

    The tree may be abstract; its leaves carry shardings. Devices are in the order of `devices_of`, the same in every
    process. Inside the `shard_map` nothing says that two devices hold the same data, so no compiler can read one copy
    for both.
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
        """Hash an array in host memory, layer by layer if its first dimension is layers.

        So only one layer is fetched at a time (jaxtrain/train_step/offload.py explains the loop).
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
        gathered = jax.shard_map(  # a single gather: XLA for CPU can deadlock in collectives that may run concurrently
            lambda rows: jax.lax.all_gather(rows, mesh.axis_names, tiled=True), mesh=mesh, in_specs=each, out_specs=P(),
            check_vma=False)(columns)
        return gathered[:, np.argsort([*here, *away])]

    return jax.jit(hashes).lower(tree).compile()


def devices_of(tree: Any) -> list[jax.Device]:
    """Return the devices of the mesh that a tree lives on."""
    return list(jax.tree.leaves(tree)[0].sharding.mesh.devices.flat)


def paths_of(tree: Any) -> list[str]:
    """Return a name for each leaf."""
    return [jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


@jax.jit  # so that leaves of equal shape are traced once
def hash_bits(x: jax.Array, first: jax.Array | int = 0) -> jax.Array:
    """Return a uint32 that changes with every single-bit change of `x`, and misses other changes with chance 2^-32.

    Each word is mixed with its position before all are summed. A sum of words times positions would not do: two flipped
    signs cancel in it, wherever they are. `first` is the offset of `x` in the first dimension of the whole array, whose
    hash is the sum over its parts.
    """
    words = x if x.dtype == bool else jax.lax.bitcast_convert_type(x, f"uint{min(8 * x.dtype.itemsize, 32)}")
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):  # not flattened, which would copy it on some devices
        begin = jnp.uint32(0 if axis else first)
        place = place * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) + begin
    mixed = words.astype(jnp.uint32) + place * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)
