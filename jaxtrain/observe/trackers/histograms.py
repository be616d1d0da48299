"""Histograms of sharded arrays, counted where they lie: only the counts and the bounds leave the devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.base.annotations import PyTree

BINS = 64


def histograms(arrays: PyTree, mesh: Any) -> dict[str, jax.Array]:
    """Return futures of the histograms of a tree's arrays by path, for `read`; all processes call it alike."""
    flat = _by_path(arrays)
    return _program(flat, mesh)(flat)


def prepare(arrays: PyTree, mesh: Any) -> None:
    """Compile what `histograms` runs for such arrays."""
    _program(_by_path(arrays), mesh)


def read(counted: dict[str, jax.Array]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the counts and the edges of each histogram, once the devices have them."""
    found = {}
    for path, (below, edges) in jax.device_get(counted).items():
        below = below.astype(np.int64).reshape(len(below), -1).sum(1)
        found[path] = np.diff(below, prepend=0), np.asarray(edges)
    return found


def _by_path(arrays: PyTree) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x
            for path, x in jax.tree_util.tree_leaves_with_path(arrays) if jnp.issubdtype(x.dtype, jnp.floating)}


_programs: dict[Any, jax.stages.Compiled] = {}


def _program(flat: dict[str, jax.Array], mesh: Any) -> jax.stages.Compiled:
    """Return the program for arrays of these shapes and shardings, compiled once."""
    key = mesh, tuple((path, x.shape, x.dtype, x.sharding) for path, x in flat.items())
    if key not in _programs:
        counted = jax.jit(lambda flat: {path: _counted(x) for path, x in flat.items()},
                          out_shardings=NamedSharding(mesh, P()))
        with jax.set_mesh(mesh):
            _programs[key] = counted.lower(flat).compile()
    return _programs[key]


def _counted(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return how many numbers lie below each edge but the first, and the edges, from the least to the greatest number.

    Numbers that are not finite count nowhere. For an edge the array is read once more, which needs no memory, and no
    communication but of the sum. Counts are integers, so the order in which devices add them makes no difference.
    """
    x = x.astype(jnp.float32)
    finite = jnp.isfinite(x)
    least, most = jnp.min(jnp.where(finite, x, jnp.inf)), jnp.max(jnp.where(finite, x, -jnp.inf))
    some = least <= most
    least, most = jnp.where(some, least, 0.0), jnp.where(some, most, 0.0)
    share = jnp.arange(BINS + 1, dtype=jnp.float32) / BINS
    edges = least * (1 - share) + most * share
    # Sums of 2^31 ones and more do not fit: such an array keeps its first dimension, which the host adds up.
    axes = tuple(range(int(x.size >= 2**31), x.ndim))

    def below(edge):
        return jnp.sum(finite & (x < edge), axis=axes, dtype=jnp.int32)
    inner = jax.lax.map(below, edges[1:-1])
    return jnp.concatenate([inner, jnp.sum(finite, axis=axes, dtype=jnp.int32)[None]]), edges
