"""Moments of an optimizer kept in bfloat16 or 8 bits: computed in float32, and rounded up or down at random.

Rounding to the nearest would lose updates that are small beside a moment; stochastic rounding keeps them on average.
Its random bits are a hash of the number of updates, the array and the element's index in the whole array, so they are
the same on every mesh. Only the moments of matrices are kept so: those of vectors are small, and stay float32.

8 bits: a moment is code^4 x scale, where the scale is the largest magnitude of a block of up to 128 elements along the
last dimension. The fourth power spends most codes on small magnitudes, of which a block has several orders. Blocks do
not depend on the mesh: where a device's part of the last dimension is not a whole number of blocks, devices exchange
what the blocks at their borders need.
"""

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from jaxtrain.sharding.axis_rules import Axes
from jaxtrain.train_step.optimizers.matrices import by_path, is_matrix
from jaxtrain.train_step.state import Params

BLOCK = 128
CODES = {jnp.dtype(jnp.int8): 127, jnp.dtype(jnp.uint8): 255}  # the code of the largest magnitude


class RoundedState(NamedTuple):
    """The state of an optimizer whose moments have fewer bits."""

    count: jax.Array  # updates so far
    first_layer: jax.Array  # where layers are updated one by one (UpdateByLayer): which one it is; else 0
    scales: Any  # like `inner`: of each moment of 8 bits its blocks' scales, elsewhere None
    inner: Any  # the optimizer's own state


def rounded(optimizer: optax.GradientTransformation, dtype: str, axes: Axes) -> optax.GradientTransformation:
    """Return the optimizer with its moments of matrices at rest in `dtype`, "bfloat16" or "int8".

    Args:
        axes: the logical names of each parameter.
    """
    names = by_path(axes)

    def resting(path, x):
        """Return the dtype of an array of the optimizer's state, whose path ends with that of its parameter."""
        owner = next((names[path[i:]] for i in range(len(path)) if path[i:] in names), ())
        fields = {getattr(key, "name", "") for key in path}
        if not is_matrix(owner) or x.ndim != len(owner) or "by_neuron" in fields:
            return x.dtype
        squares = "nu" in fields  # optax's name: they have no sign
        return jnp.dtype(jnp.bfloat16 if dtype == "bfloat16" else jnp.uint8 if squares else jnp.int8)

    def init(params: Params) -> RoundedState:
        flat, treedef = jax.tree_util.tree_flatten_with_path(optimizer.init(params))
        kinds = [resting(path, x) for path, x in flat]
        scales = [jnp.zeros((*x.shape[:-1], -(-x.shape[-1] // BLOCK)), jnp.float32) if kind in CODES else None
                  for kind, (_, x) in zip(kinds, flat, strict=True)]
        inner = [x.astype(kind) for kind, (_, x) in zip(kinds, flat, strict=True)]
        zero = jnp.zeros((), jnp.int32)
        return RoundedState(zero, zero, treedef.unflatten(scales), treedef.unflatten(inner))

    def update(updates: optax.Updates, state: Any,
               params: Params = None) -> tuple[optax.Updates, RoundedState]:
        steps, inner = optimizer.update(updates, in_float32(state), params)
        flat, treedef = jax.tree_util.tree_flatten_with_path(inner)
        seed, done = _mixed(state.count.astype(jnp.uint32)), []
        for (path, x), before in zip(flat, jax.tree.leaves(state.inner), strict=True):
            if x.dtype == before.dtype:
                done.append((x, None))
                continue
            leaf = np.uint32(zlib.crc32(jax.tree_util.keystr(path).encode()))
            bits = _random_bits(x.shape, seed ^ leaf, state.first_layer)
            done.append(to_codes(x, before.dtype, bits) if before.dtype in CODES else (to_bfloat16(x, bits), None))
        inner, scales = (treedef.unflatten(leaves) for leaves in zip(*done, strict=True))
        return steps, RoundedState(state.count + 1, state.first_layer, scales, inner)

    return optax.GradientTransformation(init, update)


def in_float32(state: RoundedState) -> optax.OptState:
    """Return the optimizer's own state, with its moments in float32."""
    leaves, treedef = jax.tree.flatten(state.inner)
    scales = treedef.flatten_up_to(state.scales)
    return treedef.unflatten([from_codes(x, scale) if scale is not None else x.astype(jnp.float32)
                              if x.dtype == jnp.bfloat16 else x for x, scale in zip(leaves, scales, strict=True)])


def to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Round to one of the two nearest bfloat16, so that the mean over random `bits` is `x`."""
    words = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits & 0xFFFF)
    return jax.lax.bitcast_convert_type((words >> 16).astype(jnp.uint16), jnp.bfloat16)


def to_codes(x: jax.Array, dtype: DTypeLike, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the 8-bit codes of `x`, of which the mean over random `bits` is `x`, and the scales of its blocks."""
    most, blocks = CODES[jnp.dtype(dtype)], _in_blocks(x)
    scale = jnp.abs(blocks).max(-1)
    share = jnp.abs(blocks) / jnp.where(scale > 0, scale, 1.0)[..., None]
    below = jnp.minimum(jnp.floor(jnp.sqrt(jnp.sqrt(share)) * most), most - 1)
    low, high = (_fourth_power(code / most) for code in (below, below + 1))
    chance = (_in_blocks(bits) >> 8).astype(jnp.float32) * 2.0**-24
    code = below + (chance < (share - low) / (high - low))
    if dtype == jnp.uint8:  # a square that became 0 would be divided by
        code = jnp.where(share > 0, jnp.maximum(code, 1), code)
    return _whole((code * jnp.sign(blocks)).astype(dtype), x.shape), scale


def from_codes(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Return what the codes stand for, in float32."""
    share = _in_blocks(codes).astype(jnp.float32) / CODES[codes.dtype]
    return _whole(jnp.sign(share) * _fourth_power(share) * scale[..., None], codes.shape)


def _fourth_power(x: jax.Array) -> jax.Array:
    return jnp.square(jnp.square(x))


def _in_blocks(x: jax.Array) -> jax.Array:
    """Cut the last dimension into blocks, of which the last one is padded with zeros."""
    block = min(BLOCK, x.shape[-1])
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)])
    return x.reshape(*x.shape[:-1], -1, block)


def _whole(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return blocks.reshape(*shape[:-1], -1)[..., :shape[-1]]


def _random_bits(shape: tuple[int, ...], seed: jax.Array, first: jax.Array) -> jax.Array:
    """Return 32 random bits for each element of an array, `first` of whose first dimension come before it."""
    bits = _mixed(seed).reshape([1] * len(shape))
    for axis, size in enumerate(shape):
        index = jax.lax.broadcasted_iota(jnp.uint32, [size if i == axis else 1 for i in range(len(shape))], axis)
        bits = _mixed(bits ^ (index + (first.astype(jnp.uint32) if axis == 0 else 0)) * np.uint32(0x9E3779B1))
    return bits


def _mixed(x: jax.Array) -> jax.Array:
    """Scramble 32-bit words: the finalizer of MurmurHash3 (Austin Appleby)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
