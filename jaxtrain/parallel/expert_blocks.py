"""Products of routed experts in MXFP8 or NVFP4: grouped products of factors that are rounded in blocks.

Blocks of rows and of matrices lie along the features that a product sums over, as in other layers
(sharding/block_products.py). The gradient of a matrix sums over the rows of its expert: a block of those are the rows
that this expert has of one window of neighbouring tokens, so that no scale depends on the mesh or on the order in which
rows arrive. It does where not all rows fit (`train.expert_buffer`), which are then rounded in several passes; and
NVFP4's float32 scale of a whole array is that of a micro-batch. NVFP4's Hadamard transform along tokens, which would
fill each window with rows that the expert does not have, is left out.

No kernel that JAX reaches multiplies groups with scales, so on all devices the rounded values, which bfloat16 holds
exactly, are multiplied in bfloat16.

Shape suffixes: B batch, T sequence, R rows, L experts held here, K and N the dimensions of a matrix.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.base.annotations import PyTree
from jaxtrain.base.narrow_formats import BLOCKS
from jaxtrain.kernels.grouped_matmul import gradient_by_rows, gradient_by_weights, grouped_matmul
from jaxtrain.parallel.expert_matrices import How, InBlocks, Rows
from jaxtrain.sharding import activations, block_formats
from jaxtrain.sharding.block_layout import plain
from jaxtrain.sharding.block_products import along, times_scales, weight_along
from jaxtrain.sharding.block_units import Noise
from jaxtrain.sharding.contractions import Rounded


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Marks:
    """The windows of tokens [N] and the random bits of each of their experts [N, K]; or both of rows [R]."""

    window: jax.Array  # of neighbouring tokens
    noise: PyTree = None  # the random bits for stochastic rounding (models/training_noise.py)


def marks(kind: str, shape: tuple[int, int], axis: tuple[str, ...], noise: PyTree = None) -> Marks:
    """Return those of the tokens [B, T] of a device.

    Args:
        kind: the format.
        shape: B and T.
        axis: over which devices exchange rows; their windows have numbers of their own.
        noise: bits [B, T, K], if there are any.
    """
    rows, length = shape
    each = -(-length // BLOCKS[kind])
    first = lax.axis_index(axis) * rows * each if axis else 0
    window_BT = first + jnp.arange(rows)[:, None] * each + jnp.arange(length) // BLOCKS[kind]
    return Marks(window_BT.reshape(-1), jax.tree.map(lambda a: a.reshape(rows * length, -1), noise))


def in_blocks(weights: Mapping[str, jax.Array], kind: str, wide: tuple[str, ...]) -> dict[str, InBlocks]:
    """Return the matrices of experts, to be rounded; `wide`: the axes that split the outputs of gate and up."""
    return {name: InBlocks(weight, kind, name, () if name == "down" else wide) for name, weight in weights.items()}


def product(how: How, x_RK: jax.Array, weight: InBlocks, at: Rows) -> jax.Array:
    """Return each row times the matrix of its expert; `how` as `grouped_matmul` takes it."""
    one = along(_filled(x_RK, at), (1, 2), weight.kind)
    other = weight_along(weight.weight, (1, 2), weight.kind, of_output=False)
    return times_scales(grouped_matmul(one.values, other.values, at.sizes, **how), one, other)


def gradients(how: How, x_RK: jax.Array, weight: InBlocks, at: Rows,
              dy_RN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of a product by rows and by the matrices."""
    x_RK, dy_RN, noise = _filled(x_RK, at), _filled(dy_RN, at), _noise(weight, at)
    one = along(dy_RN, (1, 2), weight.kind, noise, "input")
    other = weight_along(weight.weight, (1, 2), weight.kind, of_output=True)
    dx_RK = times_scales(gradient_by_rows(other.values, at.sizes, one.values, **how), one, other)
    blocks_R = _blocks(at)
    x, dy = _along_rows(x_RK, blocks_R, weight.kind), _along_rows(dy_RN, blocks_R, weight.kind, noise)
    return dx_RK, times_scales(gradient_by_weights(x.values, at.sizes, dy.values, **how), x, dy)


def _filled(x_RK: jax.Array, at: Rows) -> jax.Array:
    """Return rows, of which those behind the last are zeros: they count in no largest magnitude."""
    return jnp.where((jnp.arange(len(x_RK)) < at.sizes.sum())[:, None], x_RK, 0)


def _blocks(at: Rows) -> jax.Array:
    """Return the number of each row's block: a new one begins where the expert or the window of tokens changes."""
    experts_R, window_R = at.experts, at.marks.window
    new_R = (experts_R[1:] != experts_R[:-1]) | (window_R[1:] != window_R[:-1])
    return jnp.pad(jnp.cumsum(new_R), (1, 0))


def _along_rows(x_RK: jax.Array, blocks_R: jax.Array, kind: str, noise: Noise = None) -> Rounded:
    """Return rows rounded in these blocks of rows, of each feature by itself."""
    x_RK, dtype = plain(x_RK), x_RK.dtype
    bits_RK = block_formats.size_bits(x_RK.astype(jnp.float32))
    peaks_RK = jax.ops.segment_max(bits_RK, blocks_R, len(x_RK), indices_are_sorted=True)[blocks_R]
    if kind == "mxfp8":
        return Rounded(block_formats.mxfp8(x_RK, (), peaks_RK).values.astype(dtype), None, dtype)
    scale = block_formats.nvfp4_scale(activations.peak(x_RK))
    drawn_RK = None if noise is None else noise("weight", x_RK)
    return Rounded(block_formats.nvfp4(x_RK, (), scale, drawn_RK, peaks_RK).values.astype(dtype), scale, dtype)


def _noise(weight: InBlocks, at: Rows) -> Noise:
    """Return what draws a number in [0, 1) for each feature of each row, the same however features are split."""
    if (noise := at.marks.noise) is None:
        return None
    of_rows = jax.tree.map(lambda bits_R: bits_R[:, None], noise)

    def draw(name: str, like_RN: jax.Array) -> jax.Array:
        rows, width = like_RN.shape
        whole = width * (lax.axis_size(weight.split) if weight.split else 1)
        drawn_RN = of_rows(f"{weight.name} {name}", jnp.zeros((rows, 1, whole), like_RN.dtype))[:, 0]
        if not weight.split:
            return drawn_RN
        return lax.dynamic_slice_in_dim(drawn_RN, lax.axis_index(weight.split) * width, width, 1)

    return draw
