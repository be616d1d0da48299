"""Fingerprints of arrays that depend on every bit, and are the same on any mesh and on device or host.

An array's bits are read as 32-bit words (narrower elements are widened, 64-bit elements give both halves). Each word is
scrambled together with its position in the whole array, and all are summed modulo 2^32, in two ways. Integer sums do
not depend on their order, so the result does not depend on the sharding. Scrambling is invertible, so a change in a
single element, in whichever bits, always changes both sums. (Positions 2^32 elements apart are scrambled alike.)
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.sharding.host_memory import fetched

Words = tuple[int, int]

_PIECE = 1 << 20  # elements that the host widens at a time


class Parts(NamedTuple):
    """The sums that each device computed over its own part of an array."""

    words: jax.Array  # shape: that of the mesh, then 2
    repeated: tuple[int, ...]  # the mesh axes along which devices hold the same part


def on_device(flat: Mapping[str, jax.Array]) -> dict[str, Parts]:
    """Start summing every array on all devices, without waiting.

    The programs contain no collectives. Programs with collectives that run concurrently with the run's own may be
    ordered differently on different processes, which deadlocks.
    """
    return {path: _parts(x) for path, x in flat.items()}


def read(parts: Mapping[str, Parts]) -> dict[str, Words]:
    """Return this process's sums for each array; waits for the devices."""
    ours = {path: [shard.data for shard in words.addressable_shards if not any(shard.index[i].start for i in repeated)]
            for path, (words, repeated) in parts.items()}
    return {path: functools.reduce(add, (words.reshape(2).tolist() for words in found), (0, 0))
            for path, found in jax.device_get(ours).items()}


def total(shares: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, str]:
    """Add up the sums of all processes and return them as text, by path."""
    paths = dict.fromkeys(path for share in shares for path in share)
    return {path: text(functools.reduce(add, (share.get(path, (0, 0)) for share in shares), (0, 0))) for path in paths}


def _parts(x: jax.Array) -> Parts:
    if not isinstance(x.sharding, NamedSharding):
        return Parts(_compiled(None, None)(x), ())
    mesh, spec = x.sharding.mesh, x.sharding.spec
    used = {axis for entry in spec for axis in _axes(entry)}
    return Parts(_compiled(mesh, spec)(x), tuple(i for i, axis in enumerate(mesh.axis_names) if axis not in used))


@functools.cache
def _compiled(mesh: Any, spec: Any):
    # One program for each kind of array; a state has few kinds, since moments are shaped like parameters.
    if mesh is None:
        return jax.jit(lambda x: _of_block(fetched(x), x.shape, [0] * x.ndim))

    def add_up(x):
        def of_part(block):
            entries = (*spec, *(None,) * (x.ndim - len(spec)))
            start = [jax.lax.axis_index(_axes(entry)).astype(jnp.uint32) * size if _axes(entry) else 0
                     for entry, size in zip(entries, block.shape, strict=True)]
            return _of_block(block, x.shape, start).reshape((1,) * len(mesh.axis_names) + (2,))

        return jax.shard_map(of_part, mesh=mesh, in_specs=spec, out_specs=P(*mesh.axis_names),
                             check_vma=False)(fetched(x))

    return jax.jit(add_up)


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def of_piece(piece: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> Words:
    """Return the sums over the part of a host array of this `shape` that begins at index `start`."""
    strides, sizes = _strides(shape), list(piece.shape)
    offset = sum(index * stride for index, stride in zip(start, strides, strict=True))
    while len(sizes) > 1 and sizes[-1] == shape[len(sizes) - 1]:  # whole rows are contiguous
        sizes[-2:] = [sizes[-2] * sizes[-1]]
    width = sizes[-1] if sizes else 1
    offsets = np.full((), offset % (1 << 32), np.uint32)
    for size, stride in zip(sizes[:-1], strides, strict=False):
        offsets = np.add.outer(offsets, np.arange(size, dtype=np.uint32) * np.uint32(stride % (1 << 32)))
    rows, offsets = np.ascontiguousarray(piece).reshape(offsets.size, width), offsets.reshape(-1, 1)
    total, height = np.zeros(2, np.uint32), max(1, _PIECE // max(1, width))
    for top in range(0, len(rows), height):
        for left in range(0, width, _PIECE):
            block = rows[top:top + height, left:left + _PIECE]
            places = offsets[top:top + height] + np.arange(left, left + block.shape[1], dtype=np.uint32)
            for half, word in enumerate(_host_words(block)):
                total += [part.sum(dtype=np.uint32) for part in _mixed(word, places + np.uint32(half * _HALF))]
    return int(total[0]), int(total[1])


def add(one: Sequence[int], other: Sequence[int]) -> Words:
    """Return the combined sums of two pieces."""
    return (one[0] + other[0]) % (1 << 32), (one[1] + other[1]) % (1 << 32)


def text(words: Sequence[int]) -> str:
    """Return the sums in the text form stored in a checkpoint."""
    return f"{words[0]:08x}{words[1]:08x}"


_HALF = 0x5BD1E995  # distinguishes the upper halves of 64-bit elements


def _of_block(block: jax.Array, shape: Sequence[int], start: Sequence[Any]) -> jax.Array:
    place = jnp.uint32(0)
    for dimension, stride in enumerate(_strides(shape)):
        index = jax.lax.broadcasted_iota(jnp.uint32, block.shape, dimension) + jnp.uint32(start[dimension])
        place = place + index * np.uint32(stride % (1 << 32))
    sums = [[jnp.sum(part, dtype=jnp.uint32) for part in _mixed(word, place + np.uint32(half * _HALF))]
            for half, word in enumerate(_device_words(block))]
    return functools.reduce(jnp.add, map(jnp.stack, sums))


def _mixed(word, place):
    """Return two scrambled numbers; at a given position, different words always give different numbers."""
    mixed = word ^ (place * np.uint32(0x9E3779B1))
    mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    mixed = mixed ^ (mixed >> np.uint32(13))
    again = mixed * np.uint32(0xC2B2AE35)
    return mixed, again ^ (again >> np.uint32(16))


def _device_words(x: jax.Array) -> list[jax.Array]:
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    if x.dtype.itemsize < 8:
        return [bits.astype(jnp.uint32)]
    return [bits.astype(jnp.uint32), (bits >> np.uint64(32)).astype(jnp.uint32)]


def _host_words(block: np.ndarray) -> list[np.ndarray]:
    bits = block.view(f"uint{8 * block.dtype.itemsize}")
    if block.dtype.itemsize < 8:
        return [bits.astype(np.uint32)]
    return [bits.astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)]


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dimension + 1:]) for dimension in range(len(shape))]
