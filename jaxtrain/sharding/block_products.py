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

from jaxtrain.kernels import block_formats
from jaxtrain.kernels.block_formats import MX_BLOCK, NV_BLOCK
from jaxtrain.sharding import activations, block_layout, block_units
from jaxtrain.sharding.block_units import LEAD, Noise
from jaxtrain.sharding.products import Product, Rounded, exact_sums, scaled, transposed


def output(product: Product, x: jax.Array, weight: jax.Array, kind: str) -> jax.Array:
    """Return the output of a product in the format `kind`."""
    if (unit := block_units.of(product, x, weight, kind)) is not None:
        return unit.output(x, weight)
    return _times(product, _along(x, (LEAD, x.ndim), kind), _weight(weight, x, kind, of_output=False))


def input_gradient(product: Product, x: jax.Array | jax.ShapeDtypeStruct, weight: jax.Array, dy: jax.Array, kind: str,
                   noise: Noise = None) -> jax.Array:
    """Return the gradient with respect to the input; only the shape of `x` is read."""
    if (unit := block_units.of(product, x, weight, kind)) is not None:
        return unit.input_gradient(weight, dy, noise)
    weight, dy = _weight(weight, x, kind, of_output=True), _along(dy, (LEAD, dy.ndim), kind, noise, "input")
    with exact_sums():
        return _scaled(transposed(lambda x: product(x, weight.values), x, dy.values), weight, dy)


def weight_gradient(product: Product, x: jax.Array, weight: jax.Array | jax.ShapeDtypeStruct, dy: jax.Array, kind: str,
                    noise: Noise = None) -> jax.Array:
    """Return the gradient with respect to the weight, of which only the shape is read."""
    if (unit := block_units.of(product, x, weight, kind)) is not None:
        return unit.weight_gradient(x, dy, noise)
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
    x = block_layout.plain(x)
    if kind == "mxfp8":
        return Rounded(block_layout.in_blocks(x, dims, MX_BLOCK, lambda x, axis: block_formats.mxfp8(x, (axis,)).values), None,
                       x.dtype)
    scale = block_formats.nvfp4_scale(activations.peak(x))
    drawn = None if noise is None else noise(name, x)

    def rounded(x: jax.Array, axis: int) -> jax.Array:
        noise = None if drawn is None else block_layout.cut(drawn, dims, NV_BLOCK)
        return block_formats.nvfp4(x, (axis,), scale, noise).values

    return Rounded(block_layout.in_blocks(x, dims, NV_BLOCK, rounded), scale, x.dtype)


def _weight(weight: jax.Array, x: jax.Array | jax.ShapeDtypeStruct, kind: str, of_output: bool) -> Rounded:
    """Return a weight rounded for the product that sums over the output's dimensions, or over the input's."""
    weight, summed = block_layout.plain(weight), x.ndim - LEAD
    if kind == "mxfp8":
        return _along(weight, (summed, weight.ndim) if of_output else (0, summed), kind)
    scale = block_formats.nvfp4_scale(activations.peak(weight))

    def rounded(x: jax.Array, axis: int) -> jax.Array:  # [blocks, 16, ...]
        return block_layout.in_blocks(x, (2, x.ndim), NV_BLOCK, lambda x, _: block_formats.nvfp4(x, (1, 3), scale).values)

    return Rounded(block_layout.in_blocks(weight, (0, summed), NV_BLOCK, rounded), scale, weight.dtype)


def _rotated(x: jax.Array, kind: str) -> jax.Array:
    """Return an array after NVFP4's Hadamard transform along tokens, in float32; a row of whole blocks only has one."""
    if kind != "nvfp4" or x.shape[LEAD - 1] % NV_BLOCK:
        return x
    x, matrix = block_layout.plain(x), jnp.asarray(block_formats.hadamard(), x.dtype)

    def rotated(x: jax.Array, axis: int) -> jax.Array:
        with exact_sums():
            return jnp.einsum("bnt...,ts->bns...", x, matrix, preferred_element_type=jnp.float32)

    return block_layout.in_blocks(x, (LEAD - 1, LEAD), NV_BLOCK, rotated, jnp.float32)
