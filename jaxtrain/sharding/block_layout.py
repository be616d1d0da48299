"""Arrays cut into blocks of neighbours, on a mesh too: a block is one of the whole array, wherever its parts lie."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxtrain.sharding.axis_rules import SpecEntry, axes_of
from jaxtrain.sharding.mesh_context import current, is_explicit

Entries = tuple[SpecEntry, ...]  # of each dimension, the mesh axes that split it


def on_mesh() -> bool:
    """Return whether arrays that are traced now have a layout."""
    return (here := current()) is not None and is_explicit(here[0])


def entries_of(x: jax.Array | jax.ShapeDtypeStruct) -> Entries:
    """Return how each dimension of an array is split."""
    spec = (getattr(x.sharding, "spec", P()) if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).sharding.spec)
    return (*spec.partitions, *(None,) * x.ndim)[:x.ndim]


def shards(entry: SpecEntry) -> int:
    """Return over how many devices a dimension is split."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in axes_of(entry))


def plain(x: jax.Array) -> jax.Array:
    """Return an array as it is in memory, without what its type says of its gradient."""
    spec = jax.typeof(x).sharding.spec
    if spec.reduced:
        x = jax.reshard(x, P(*spec.partitions))
    if x.dtype == jnp.float32:
        return x
    # XLA would hand over the float32 that `x` was cast from: another number, and an array of twice the size.
    return jax.lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, jnp.finfo(x.dtype).nmant)


def laid_out(x: jax.Array, entries: Entries) -> jax.Array:
    """Return an array in this layout."""
    return jax.reshard(x, P(*entries)) if on_mesh() and entries != entries_of(x) else x


def reshaped(x: jax.Array, shape: tuple[int, ...], entries: Entries) -> jax.Array:
    """Return an array in this shape and layout, which leaves each number on its device."""
    return jax.lax.reshape(x, shape, out_sharding=P(*entries)) if on_mesh() else x.reshape(shape)


def merged(x: jax.Array, first: int, last: int) -> jax.Array:
    """Return an array whose dimensions from `first` to before `last` have become one, split as the first of them was.
    """
    entries = entries_of(x)
    x = laid_out(x, (*entries[:first + 1], *(None,) * (last - first - 1), *entries[last:]))
    return reshaped(x, (*x.shape[:first], math.prod(x.shape[first:last]), *x.shape[last:]),
                    (*entries[:first + 1], *entries[last:]))


def split(x: jax.Array, dim: int, sizes: tuple[int, ...]) -> jax.Array:
    """Return an array with dimensions of these sizes in place of one, which is split as their first."""
    entries = entries_of(x)
    return reshaped(x, (*x.shape[:dim], *sizes, *x.shape[dim + 1:]),
                    (*entries[:dim + 1], *(None,) * (len(sizes) - 1), *entries[dim + 1:]))


def whole_blocks(size: int, entry: SpecEntry, block: int) -> bool:
    """Return whether each device has whole blocks of a dimension."""
    return size % (block * shards(entry)) == 0


def cut(x: jax.Array, dims: tuple[int, int], block: int) -> jax.Array:
    """Return an array whose dimensions from the first to before the last have become two: blocks, and what is in them.

    Where a device has no whole blocks the dimension is gathered; zeros fill the last block.
    """
    first, last = dims
    x = merged(x, first, last)
    size, entries = x.shape[first], entries_of(x)
    if not whole_blocks(size, entries[first], block):
        x = laid_out(x, (*entries[:first], None, *entries[first + 1:]))
    if size % block:
        x = jnp.pad(x, [(0, -size % block if d == first else 0) for d in range(x.ndim)])
    return split(x, first, (-(-size // block), block))


def in_blocks(x: jax.Array, dims: tuple[int, int], block: int, f: Callable[[jax.Array, int], jax.Array],
              dtype: DTypeLike | None = None) -> jax.Array:
    """Return `f(blocks, axis)` in the shape and layout of `x`, where `axis` is the dimension within a block."""
    first, last = dims
    y = merged(f(cut(x, dims, block), first + 1).astype(dtype or x.dtype), first, first + 2)
    y = jax.lax.slice_in_dim(y, 0, math.prod(x.shape[first:last]), axis=first)
    return laid_out(split(y, first, x.shape[first:last]), entries_of(x))
