"""Sums over arrays that depend on every bit; checkpoints store them, and replicas are compared by them.

An array's bits are read as 32-bit words (narrower elements are widened, 64-bit elements give both halves). Each word is
scrambled together with its position in the whole array, and all are summed modulo 2^32, in two ways. Integer sums do
not depend on their order, so the sums of the parts of an array, however it is divided, add up to those of the whole.
Scrambling is invertible, so a change in a single element, in whichever bits, always changes both sums; other changes
are missed with chance 2^-32 at most. A sum of words times positions would not do: two flipped signs cancel in it,
wherever they are. (Positions 2^32 elements apart are scrambled alike.)
"""

import math
from collections.abc import Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import AnyArray
from jaxtrain.sharding.host_memory import fetched

MOST_LAYERS = 1024
_UPPER = 0x5BD1E995  # distinguishes the upper halves of 64-bit elements


def bit_sums(part: AnyArray, start: Sequence[AnyArray | int], shape: Sequence[int]) -> list[AnyArray]:
    """Return the two sums over a part of an array of this `shape` that begins at index `start`; NumPy's or JAX's."""
    xp, place = part.__array_namespace__(), np.uint32(0)
    for axis, (first, size) in enumerate(zip(start, part.shape, strict=True)):  # not flattened: that may copy
        index = xp.arange(size, dtype=np.uint32) + xp.asarray(first, dtype=np.uint32)
        index = index * np.uint32(math.prod(shape[axis + 1:]) % (1 << 32))
        place = place + index.reshape(-1, *[1] * (part.ndim - axis - 1))
    bits = part.view(f"uint{8 * part.dtype.itemsize}")
    sums = _scrambled_sums(xp, bits.astype(np.uint32), place)
    if part.dtype.itemsize == 8:
        upper = _scrambled_sums(xp, (bits >> np.uint64(32)).astype(np.uint32), place + np.uint32(_UPPER))
        sums = [lower + more for lower, more in zip(sums, upper, strict=True)]
    return sums


def _scrambled_sums(xp: ModuleType, word: AnyArray, place: AnyArray) -> list[AnyArray]:
    """Sum two scrambled numbers of each word; at a given position, different words always give different numbers."""
    mixed = word ^ (place * np.uint32(0x9E3779B1))
    mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    mixed = mixed ^ (mixed >> np.uint32(13))
    again = mixed * np.uint32(0xC2B2AE35)
    return [xp.sum(numbers, dtype=np.uint32) for numbers in (mixed, again ^ (again >> np.uint32(16)))]


def device_sums(x: jax.Array, sharding: NamedSharding, sums: int = 2) -> jax.Array:
    """Return the sums over the part that each device of the mesh holds, as uint32 [devices, sums]; to be compiled.

    It contains no collectives. Inside the `shard_map` nothing says that two devices hold the same data, so no compiler
    can read one copy for both. An array in host memory whose first dimension is layers is read layer by layer, so that
    only one is fetched at a time (jaxtrain/extensions/update_by_layer.py explains the loop).
    """
    mesh, spec = sharding.mesh, (*sharding.spec, *[None] * (x.ndim - len(sharding.spec)))

    def over(some, first=0):  # `first`: the index of these layers
        def own(part, first):
            start = [jax.lax.axis_index(entry).astype(jnp.uint32) * size if entry else first * (axis == 0)
                     for axis, (entry, size) in enumerate(zip(spec, part.shape, strict=True))]
            return jnp.stack(bit_sums(part, start, x.shape)[:sums])[None]

        return jax.shard_map(own, mesh=mesh, in_specs=(P(*spec), P()), out_specs=P(mesh.axis_names), check_vma=False)(
            fetched(some), jnp.uint32(first))

    in_layers = x.ndim > 1 and 1 < x.shape[0] <= MOST_LAYERS and not spec[0]
    if not in_layers or jax.typeof(x).memory_space != jax.memory.Space.Host:
        return over(x)
    return jax.lax.fori_loop(
        1, x.shape[0], lambda at, before: before + over(jax.lax.dynamic_slice_in_dim(x, at, 1), at),
        over(jax.lax.slice_in_dim(x, 0, 1)))
