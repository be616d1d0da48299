"""Fingerprints of arrays that depend on every bit, and are the same on any mesh and on device or host.

A fingerprint is the two sums of `jaxtrain/sharding/bit_sums.py` over the whole array.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.sharding.bit_sums import bit_sums, device_sums

Words = tuple[int, int]
Parts = list[jax.Array]  # the sums over each part of an array of which this process has the first copy

_PIECE = 1 << 15  # elements that the host widens at a time; for larger ones malloc asks the system each time
_device_sums = jax.jit(device_sums, static_argnums=1)  # one program a kind: moments are shaped like parameters


def on_device(flat: Mapping[str, jax.Array]) -> dict[str, Parts]:
    """Start summing every array on all devices, without waiting.

    The programs contain no collectives. Programs with collectives that run concurrently with the run's own may be
    ordered differently on different processes, which deadlocks.
    """
    return {path: _parts(x) for path, x in flat.items()}


def _parts(x: jax.Array) -> Parts:
    where = x.sharding
    if not isinstance(where, NamedSharding):  # one device
        where = NamedSharding(Mesh(np.array(list(where.device_set)), "all"), P())
    sums = _device_sums(x, where).addressable_shards
    return [row.data for row, part in zip(sums, x.addressable_shards, strict=True) if part.replica_id == 0]


def read(parts: Mapping[str, Parts]) -> dict[str, Words]:
    """Return this process's sums for each array; waits for the devices."""
    return {path: functools.reduce(add, (row[0].tolist() for row in rows), (0, 0))
            for path, rows in jax.device_get(dict(parts)).items()}


def total(shares: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, str]:
    """Add up the sums of all processes and return them as text, by path."""
    paths = dict.fromkeys(path for share in shares for path in share)
    return {path: text(functools.reduce(add, (share.get(path, (0, 0)) for share in shares), (0, 0))) for path in paths}


def of_piece(piece: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> Words:
    """Return the sums over the part of a host array of this `shape` that begins at index `start`."""
    if piece.size > _PIECE:
        axis = next(axis for axis, size in enumerate(piece.shape) if size > 1)
        half = piece.shape[axis] // 2
        there = [first + half * (at == axis) for at, first in enumerate(start)]
        one, other = np.split(piece, [half], axis)
        return add(of_piece(one, start, shape), of_piece(other, there, shape))
    with np.errstate(over="ignore"):  # NumPy warns of scalars
        first, second = bit_sums(piece, [index % (1 << 32) for index in start], shape)
    return int(first), int(second)


def add(one: Sequence[int], other: Sequence[int]) -> Words:
    """Return the combined sums of two pieces."""
    return (one[0] + other[0]) % (1 << 32), (one[1] + other[1]) % (1 << 32)


def text(words: Sequence[int]) -> str:
    """Return the sums in the text form stored in a checkpoint."""
    return f"{words[0]:08x}{words[1]:08x}"
