"""Weights at rest in 8 or 4 bits: along one dimension, each block of values has a scale.

int8 has 255 levels at equal distances. nf4, the 4-bit NormalFloat of QLoRA (arXiv 2305.14314), has 16 levels that
normally distributed values use equally often; two of them share a byte.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxtrain.base.annotations import AnyArray
from jaxtrain.errors import UserError

BLOCK = 64  # values with one scale, or as many as a smaller dimension has in the largest power of two that divides it
_NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)


def quantize(weight: AnyArray, kind: str, dimension: int) -> tuple[AnyArray, AnyArray]:
    """Return the values and the scales of a weight whose blocks lie along this dimension, in NumPy or JAX.

    Scales of values that are not finite are not finite either, so that they do not become others unnoticed.
    """
    xp: Any = jnp if isinstance(weight, jax.Array) else np
    if (block := block_of(weight.shape[dimension])) < 4:
        raise UserError("lora.quantize", f"a weight of the shape {list(weight.shape)} has no dimension in multiples of "
                        "4 that stays whole", "leave it out")
    blocks = _in_blocks(weight.astype(np.float32), dimension, block)
    peak = xp.abs(blocks).max(dimension + 1, keepdims=True)
    scales = (peak / 127 if kind == "int8" else peak).astype(jnp.bfloat16)
    own = scales.astype(np.float32)
    levels = (blocks / xp.where(own == 0, 1, own)).reshape(weight.shape)
    if kind == "int8":
        values = xp.clip(xp.rint(levels), -127, 127).astype(np.int8)
    else:
        # One comparison after the other: all at once would take 15 times the memory.
        between = [np.float32((low + high) / 2) for low, high in itertools.pairwise(_NF4)]
        numbers = sum((levels > value).astype(np.uint8) for value in between)
        pairs = _in_blocks(numbers, dimension, 2)
        first, second = (xp.take(pairs, n, dimension + 1) for n in (0, 1))
        values = first | (second << 4)
    return values, scales.squeeze(dimension + 1)


def quantize_like(values: AnyArray, scales: AnyArray, weight: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Return the values and the scales of a weight as others are, which may be abstract."""
    return quantize(weight, "nf4" if values.dtype == np.uint8 else "int8", dimension_of(values, scales))


def dequantize(values: AnyArray, scales: AnyArray, dtype: DTypeLike) -> AnyArray:
    """Return the weight that these values and scales stand for."""
    xp: Any = jnp if isinstance(values, jax.Array) else np
    shape, dimension = shape_of(values, scales), dimension_of(values, scales)
    if values.dtype == np.uint8:
        numbers = xp.stack([values & 15, values >> 4], dimension + 1).reshape(shape)
        # Exact, since all terms but one are zero. A choice among constants would need them in the weight's shape, which
        # JAX computes once, before the loop over layers, where they fill the memory.
        levels = sum((numbers == number).astype(np.float32) * np.float32(level) for number, level in enumerate(_NF4))
    else:
        levels = values.astype(np.float32)
    blocks = _in_blocks(levels, dimension, shape[dimension] // scales.shape[dimension])
    return (blocks * xp.expand_dims(scales.astype(np.float32), dimension + 1)).reshape(shape).astype(dtype)


def shape_of(values: AnyArray, scales: AnyArray) -> tuple[int, ...]:
    """Return the shape of the weight that these stand for; they may be abstract."""
    dimension, packed = dimension_of(values, scales), 2 if values.dtype == np.uint8 else 1
    return tuple(size * packed if d == dimension else size for d, size in enumerate(values.shape))


def block_of(size: int) -> int:
    """Return how many values of a dimension of this size have one scale."""
    return min(BLOCK, size & -size)


def dimension_of(values: AnyArray, scales: AnyArray) -> int:
    """Return the dimension along which blocks lie: that in which there are fewer scales."""
    return next(d for d, (many, few) in enumerate(zip(values.shape, scales.shape, strict=True)) if many != few)


def _in_blocks(x: AnyArray, dimension: int, block: int) -> AnyArray:
    return x.reshape(*x.shape[:dimension], -1, block, *x.shape[dimension + 1:])
