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

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxtrain.sharding import activations, block_formats, block_units
from jaxtrain.sharding.block_formats import MX_BLOCK, NV_BLOCK
from jaxtrain.sharding.block_layout import cut, in_blocks, plain
from jaxtrain.sharding.block_units import LEAD, Noise
from jaxtrain.sharding.contractions import Product, Rounded, exact_sums, scaled, transposed

Abstract = jax.Array | jax.ShapeDtypeStruct


def output(product: Product, x: jax.Array, weight: jax.Array, kind: str) -> jax.Array:
    """Return the output of a product in the format `kind`."""
    if (unit := block_units.of(product, x, weight, kind)) is not None:
        return unit.output(x, weight)
    one, other = along(x, (LEAD, x.ndim), kind), weight_along(weight, (0, x.ndim - LEAD), kind, of_output=False)
    return times_scales(product(one.values, other.values), one, other)


def input_gradient(product: Product, x: Abstract, weight: jax.Array, dy: jax.Array, kind: str,
                   noise: Noise = None) -> jax.Array:
    """Return the gradient with respect to the input, of which only the shape is read."""
    if (unit := block_units.of(product, x, weight, kind)) is not None:
        return unit.input_gradient(weight, dy, noise)
    one = along(dy, (LEAD, dy.ndim), kind, noise, "input")
    other = weight_along(weight, (0, x.ndim - LEAD), kind, of_output=True)
    with exact_sums():
        return times_scales(transposed(lambda x: product(x, other.values), x, one.values), one, other)


def weight_gradient(product: Product, x: jax.Array, weight: Abstract, dy: jax.Array, kind: str,
                    noise: Noise = None) -> jax.Array:
    """Return the gradient with respect to the weight, of which only the shape is read."""
    if (unit := block_units.of(product, x, weight, kind)) is not None:
        return unit.weight_gradient(x, dy, noise)
    tokens = LEAD - 1, LEAD
    one, other = (along(_rotated(a, kind), tokens, kind, drawn, "weight", a.dtype) for a, drawn in (
        (x, None), (dy, noise)))
    with exact_sums():
        return times_scales(transposed(lambda weight: product(one.values, weight), weight, other.values), one, other)


def times_scales(y: jax.Array, one: Rounded, other: Rounded) -> jax.Array:
    """Return a product of two factors from that of their values; those of MXFP8 have no scale of the whole array."""
    return y if one.scale is None else scaled(y, one, other)


def along(x: jax.Array, dims: tuple[int, int], kind: str, noise: Noise = None, name: str = "",
          dtype: DTypeLike | None = None) -> Rounded:
    """Return an array rounded in blocks along these dimensions, from the first to before the last, taken as one.

    Args:
        x: the array.
        dims: the dimensions.
        kind: the format.
        noise: draws the numbers by which NVFP4 rounds stochastically.
        name: of the product, which draws numbers of its own.
        dtype: of the result, which holds the values exactly; None: that of `x`.
    """
    x, dtype = plain(x), dtype or x.dtype

    def mxfp8(x: jax.Array, axis: int) -> jax.Array:
        return block_formats.mxfp8(x, (axis,)).values

    if kind == "mxfp8":
        return Rounded(in_blocks(x, dims, MX_BLOCK, mxfp8, dtype), None, dtype)
    scale = block_formats.nvfp4_scale(activations.peak(x))
    drawn = None if noise is None else cut(noise(name, x), dims, NV_BLOCK)

    def nvfp4(x: jax.Array, axis: int) -> jax.Array:
        return block_formats.nvfp4(x, (axis,), scale, drawn).values

    return Rounded(in_blocks(x, dims, NV_BLOCK, nvfp4, dtype), scale, dtype)


def weight_along(weight: jax.Array, inner: tuple[int, int], kind: str, of_output: bool) -> Rounded:
    """Return a weight rounded for the product that sums over the input's dimensions, or over those of the output.

    Args:
        weight: [..., dimensions of the input, dimensions of the output].
        inner: the dimensions of the input, from the first to before the last.
        kind: the format.
        of_output: whether the product sums over those of the output.
    """
    weight, (first, last) = plain(weight), inner
    if kind == "mxfp8":
        return along(weight, (last, weight.ndim) if of_output else inner, kind)
    scale = block_formats.nvfp4_scale(activations.peak(weight))

    def tiles(x: jax.Array, _: int) -> jax.Array:
        return block_formats.nvfp4(x, (first + 1, first + 3), scale).values

    def columns(x: jax.Array, _: int) -> jax.Array:  # [..., blocks, 16, ...]
        return in_blocks(x, (first + 2, x.ndim), NV_BLOCK, tiles)

    return Rounded(in_blocks(weight, inner, NV_BLOCK, columns), scale, weight.dtype)


def _rotated(x: jax.Array, kind: str) -> jax.Array:
    """Return an array after NVFP4's Hadamard transform along tokens, in float32; a row of whole blocks only has one."""
    if kind != "nvfp4" or x.shape[LEAD - 1] % NV_BLOCK:
        return x
    x = plain(x)
    matrix = jnp.asarray(block_formats.hadamard(), x.dtype)

    def rotated(x: jax.Array, _: int) -> jax.Array:
        with exact_sums():
            return jnp.einsum("bnt...,ts->bns...", x, matrix, preferred_element_type=jnp.float32)

    return in_blocks(x, (LEAD - 1, LEAD), NV_BLOCK, rotated, jnp.float32)
