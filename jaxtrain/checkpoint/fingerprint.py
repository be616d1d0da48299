"""Fingerprints of arrays that depend on every bit, and are the same on any mesh and on device or host.

A fingerprint is the two sums of `jaxtrain/sharding/bit_sums.py` over the whole array.
"""

import functools
from collections.abc import Hashable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import AnyArray
from jaxtrain.sharding.bit_sums import bit_sums, device_sums

Words = tuple[int, int]
Parts = list[jax.Array]  # the sums over each part of an array of which this process has the first copy

_PIECE = 1 << 15  # elements that the host widens at a time; for larger ones malloc asks the system each time
_compiled: dict[Hashable, jax.stages.Compiled] = {}  # programs that were compiled before, by the arrays that they sum
_sums_of_one = jax.jit(device_sums, static_argnums=1)  # compiled once for all arrays of a kind


@functools.partial(jax.jit, static_argnums=1)
def _sums(arrays: list[jax.Array], shardings: tuple[NamedSharding, ...]) -> list[jax.Array]:
    """Sum all arrays in one program, which takes long enough to compile for JAX to keep it for the next start."""
    return [_sums_of_one(x, where) for x, where in zip(arrays, shardings, strict=True)]


def on_device(flat: Mapping[str, jax.Array]) -> dict[str, Parts]:
    """Start summing every array on all devices, without waiting.

    The program contains no collectives. Programs with collectives that run concurrently with the run's own may be
    ordered differently on different processes, which deadlocks.
    """
    if _compiled and (program := _compiled.get(_kind(flat))):
        return _first_copies(flat, dict(zip(flat, program(list(flat.values())), strict=True)))
    where = {path: _on_mesh(x.sharding) for path, x in flat.items()}
    sums: dict[str, jax.Array] = {}
    for mesh in {sharding.mesh: None for sharding in where.values()}:  # most states have one
        paths = [path for path in flat if where[path].mesh == mesh]
        sums.update(zip(paths, _sums([flat[path] for path in paths], tuple(map(where.get, paths))), strict=True))
    return _first_copies(flat, sums)


def lower(flat: Mapping[str, AnyArray], on: Mesh, platforms: tuple[str, ...] | None = None) -> jax.stages.Lowered:
    """Return what sums such arrays, which are abstract and lie on one mesh, traced and lowered for these devices."""
    where = tuple(x.sharding for x in flat.values())
    program = jax.jit(lambda arrays: _sums(arrays, where), out_shardings=NamedSharding(on, P(on.axis_names)))
    return program.trace(list(flat.values())).lower(lowering_platforms=platforms)


def use(flat: Mapping[str, AnyArray], program: jax.stages.Compiled) -> None:
    """Sum such arrays by a program that was compiled before."""
    _compiled[_kind(flat)] = program


def _kind(flat: Mapping[str, AnyArray]) -> Hashable:
    return tuple((path, x.shape, x.dtype, x.sharding) for path, x in flat.items())


def _first_copies(flat: Mapping[str, jax.Array], sums: Mapping[str, jax.Array]) -> dict[str, Parts]:
    return {path: [row.data for row, part in zip(sums[path].addressable_shards, x.addressable_shards, strict=True)
                   if part.replica_id == 0] for path, x in flat.items()}


def _on_mesh(sharding: Sharding) -> NamedSharding:
    if isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(Mesh(np.array(list(sharding.device_set)), "all"), P())  # one device


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
