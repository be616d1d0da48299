"""Products of activations and weights in MXFP8 or NVFP4: each of the three products of a layer rounds its own factors.

Blocks lie along the dimensions that a product sums over: the output sums over the input's features, the input's
gradient over the output's, and a weight's gradient over tokens, of each row by itself. So every array is rounded
twice, once for each product that reads it. What the formats' recipes ask for beside that:

* mxfp8 (arXiv 2506.08027): e4m3 everywhere, also for gradients.
* nvfp4 (arXiv 2509.25149): weights in blocks of 16 x 16, so that both products read the same numbers; gradients are
  rounded stochastically; both factors of a weight's gradient go through a random Hadamard transform along tokens.

A block is one of the whole array, so that the numbers do not depend on the mesh: where a device holds no whole blocks,
the dimension is gathered first, and a dimension that is no multiple of a block ends in one that zeros fill.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.kernels import block_formats
from jaxtrain.kernels.block_formats import MX_BLOCK, NV_BLOCK
from jaxtrain.sharding import activations
from jaxtrain.sharding.axis_rules import axes_of
from jaxtrain.sharding.mesh_context import current, is_explicit
from jaxtrain.sharding.products import Product, Rounded, exact_sums, scaled, transposed

LEAD = 2  # dimensions of an input before those that a product sums over: rows and tokens
Noise = Callable[[str, jax.Array], jax.Array] | None  # a name and an array -> numbers in [0, 1) in its shape


def output(product: Product, x: jax.Array, weight: jax.Array, kind: str) -> jax.Array:
    """Return the output of a product in the format `kind`."""
    return _times(product, _along(x, (LEAD, x.ndim), kind), _weight(weight, x, kind, of_output=False))


def input_gradient(product: Product, x: jax.Array | jax.ShapeDtypeStruct, weight: jax.Array, dy: jax.Array, kind: str,
                   noise: Noise = None) -> jax.Array:
    """Return the gradient with respect to the input; only the shape of `x` is read."""
    weight, dy = _weight(weight, x, kind, of_output=True), _along(dy, (LEAD, dy.ndim), kind, noise, "input")
    with exact_sums():
        return _scaled(transposed(lambda x: product(x, weight.values), x, dy.values), weight, dy)


def weight_gradient(product: Product, x: jax.Array, weight: jax.Array | jax.ShapeDtypeStruct, dy: jax.Array, kind: str,
                    noise: Noise = None) -> jax.Array:
    """Return the gradient with respect to the weight, of which only the shape is read."""
    x, dy = _rotated(x, kind), _rotated(dy, kind)
    x, dy = _along(x, (LEAD - 1, LEAD), kind), _along(dy, (LEAD - 1, LEAD), kind, noise, "weight")
    x, dy = Rounded(x.values.astype(weight.dtype), x.scale, weight.dtype), dy
    with exact_sums():
        return _scaled(transposed(lambda weight: product(x.values, weight), weight, dy.values.astype(weight.dtype)),
                       x, dy)


def _times(product: Product, x: Rounded, weight: Rounded) -> jax.Array:
    return _scaled(product(x.values, weight.values), x, weight)


def _scaled(y: jax.Array, one: Rounded, other: Rounded) -> jax.Array:
    return y if one.scale is None else scaled(y, one, other)


# ------------------------------------------------------------------------------------------------------------- rounding
def _along(x: jax.Array, dims: tuple[int, int], kind: str, noise: Noise = None, name: str = "") -> Rounded:
    """Return an array rounded in blocks along these dimensions, from the first to before the last, taken as one."""
    x = _plain(x)
    if kind == "mxfp8":
        return Rounded(_in_blocks(x, dims, MX_BLOCK, lambda x, axis: block_formats.mxfp8(x, (axis,)).values), None,
                       x.dtype)
    scale = block_formats.nvfp4_scale(activations.peak(x))
    drawn = None if noise is None else noise(name, x)

    def rounded(x: jax.Array, axis: int) -> jax.Array:
        noise = None if drawn is None else _cut(drawn, dims, NV_BLOCK)
        return block_formats.nvfp4(x, (axis,), scale, noise).values

    return Rounded(_in_blocks(x, dims, NV_BLOCK, rounded), scale, x.dtype)


def _weight(weight: jax.Array, x: jax.Array | jax.ShapeDtypeStruct, kind: str, of_output: bool) -> Rounded:
    """Return a weight rounded for the product that sums over the output's dimensions, or over the input's."""
    weight, summed = _plain(weight), x.ndim - LEAD
    if kind == "mxfp8":
        return _along(weight, (summed, weight.ndim) if of_output else (0, summed), kind)
    scale = block_formats.nvfp4_scale(activations.peak(weight))

    def rounded(x: jax.Array, axis: int) -> jax.Array:  # [blocks, 16, ...]
        return _in_blocks(x, (2, x.ndim), NV_BLOCK, lambda x, _: block_formats.nvfp4(x, (1, 3), scale).values)

    return Rounded(_in_blocks(weight, (0, summed), NV_BLOCK, rounded), scale, weight.dtype)


def _rotated(x: jax.Array, kind: str) -> jax.Array:
    """Return an array after NVFP4's Hadamard transform along tokens, in float32; a row of whole blocks only has one."""
    if kind != "nvfp4" or x.shape[LEAD - 1] % NV_BLOCK:
        return x
    x, matrix = _plain(x), jnp.asarray(block_formats.hadamard(), x.dtype)

    def rotated(x: jax.Array, axis: int) -> jax.Array:
        with exact_sums():
            return jnp.einsum("bnt...,ts->bns...", x, matrix, preferred_element_type=jnp.float32)

    return _in_blocks(x, (LEAD - 1, LEAD), NV_BLOCK, rotated, jnp.float32)


# --------------------------------------------------------------------------------------------------------------- layout
def _plain(x: jax.Array) -> jax.Array:
    """Return an array as it is in memory, without what its type says of its gradient."""
    spec = jax.typeof(x).sharding.spec
    if spec.reduced:
        x = jax.reshard(x, P(*spec.partitions))
    if x.dtype == jnp.float32:
        return x
    # XLA would hand over the float32 that `x` was cast from: another number, and an array of twice the size.
    return jax.lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, jnp.finfo(x.dtype).nmant)


def _in_blocks(x: jax.Array, dims: tuple[int, int], block: int, f: Callable[[jax.Array, int], jax.Array],
               dtype: jnp.dtype | None = None) -> jax.Array:
    """Return `f(blocks, axis)` in the shape and layout of `x`, where `axis` is the dimension within a block."""
    first, last = dims
    y = f(_cut(x, dims, block), first + 1).astype(dtype or x.dtype)
    merged, size = (*x.shape[:first], -1, *x.shape[last:]), math.prod(x.shape[first:last])
    spec = _spec(y)
    y = _reshaped(y, (*merged[:first], y.shape[first] * block, *merged[first + 1:]), (*spec[:first + 1],
                                                                                     *spec[first + 2:]))
    y = jax.lax.slice_in_dim(y, 0, size, axis=first)
    spec = (*spec[:first + 1], *(None,) * (last - first - 1), *spec[first + 2:])
    return _laid_out(_reshaped(y, x.shape, spec), _spec(x))


def _cut(x: jax.Array, dims: tuple[int, int], block: int) -> jax.Array:
    """Return an array whose dimensions `dims` have become two: the number of a block, and the place within it."""
    first, last = dims
    spec, size = _spec(x), math.prod(x.shape[first:last])
    shards = _shards(spec[first])
    entry = None if size % (block * shards) else spec[first]
    x = _laid_out(x, (*spec[:first], entry, *(None,) * (last - first - 1), *spec[last:]))
    x = _reshaped(x, (*x.shape[:first], size, *x.shape[last:]), (*spec[:first], entry, *spec[last:]))
    if size % block:
        x = jnp.pad(x, [(0, -size % block if d == first else 0) for d in range(x.ndim)])
    return _reshaped(x, (*x.shape[:first], -(-size // block), block, *x.shape[first + 1:]),
                     (*spec[:first], entry, None, *spec[last:]))


def _spec(x: jax.Array) -> tuple:
    """Return how each dimension is split over the mesh."""
    return (*jax.typeof(x).sharding.spec.partitions, *(None,) * x.ndim)[:x.ndim]


def _shards(entry: object) -> int:
    """Return over how many devices a dimension is split."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in axes_of(entry))


def _on_mesh() -> bool:
    return (here := current()) is not None and is_explicit(here[0])


def _laid_out(x: jax.Array, spec: tuple) -> jax.Array:
    return jax.reshard(x, P(*spec)) if _on_mesh() and spec != _spec(x) else x


def _reshaped(x: jax.Array, shape: tuple[int, ...], spec: tuple) -> jax.Array:
    return jax.lax.reshape(x, shape, out_sharding=P(*spec)) if _on_mesh() else x.reshape(shape)
