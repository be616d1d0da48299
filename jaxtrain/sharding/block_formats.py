"""Arrays in 8 or 4 bits whose blocks of neighbours share a scale: MXFP8 and NVFP4, by their published formulas.

* MXFP8 (OCP Microscaling Formats 1.0): 32 elements of e4m3 and a power of two, e8m0. It is the smallest one with which
  no element saturates, as in NVIDIA's recipe (arXiv 2506.08027, section 3); the specification's own conversion rounds
  it down, and clips.
* NVFP4 (arXiv 2509.25149, appendix B): 16 elements of e2m1, a scale in e4m3, and one of float32 for the whole array.

Arrays are given cut into blocks: `axes` are the dimensions that lie within a block. Zeros stay zeros, an infinity or a
NaN makes its whole block NaN, and numbers below 2^-126, which devices flush, count as zeros.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MX_BLOCK, NV_BLOCK = 32, 16
E4M3_MOST, E2M1_MOST = 448.0, 6.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """An array cut into blocks, as elements on the grid of a narrow format and a scale of each block."""

    elements: jax.Array  # as float32, which holds them exactly
    scales: jax.Array  # of the same rank; 1 along the dimensions within a block

    @property
    def values(self) -> jax.Array:
        """The values that elements and scales stand for, in float32; of NVFP4 without the whole array's scale."""
        if self.scales.dtype == jnp.float8_e4m3fn:
            return self.elements * self.scales.astype(jnp.float32)
        tiny = self.scales == 0  # 2^-127 is no normal number of float32
        power = lax.bitcast_convert_type(jnp.where(tiny, 1, self.scales).astype(jnp.uint32) << 23, jnp.float32)
        power = jnp.where(self.scales == 255, jnp.nan, power)
        return self.elements * jnp.where(tiny, 0.5, 1.0) * power


def mxfp8(x: jax.Array, axes: tuple[int, ...], peak_bits: jax.Array | None = None) -> Blocks:
    """Return an array in MXFP8; the scales are the bytes of e8m0, exponents with a bias of 127.

    `peak_bits`: those of the largest magnitude in the block of each element, where blocks are no dimensions.
    """
    x = x.astype(jnp.float32)
    bits = _peak_bits(x, axes) if peak_bits is None else peak_bits
    exponent, fraction = (bits >> 23).astype(jnp.int32), bits & 0x7FFFFF
    # 448 is 1.75 x 2^8: a peak with a larger fraction needs one power more.
    byte = jnp.clip(exponent - 8 + (fraction > 0x600000), 0, 254)
    byte = jnp.where(exponent == 255, 255, byte)  # infinite, or NaN
    inverse = lax.bitcast_convert_type((254 - jnp.minimum(byte, 253)).astype(jnp.uint32) << 23, jnp.float32)
    elements = jnp.clip(x * inverse, -E4M3_MOST, E4M3_MOST).astype(jnp.float8_e4m3fn)
    return Blocks(elements.astype(jnp.float32), byte.astype(jnp.uint8))


def nvfp4(x: jax.Array, axes: tuple[int, ...], scale: jax.Array, noise: jax.Array | None = None,
          peak_bits: jax.Array | None = None) -> Blocks:
    """Return an array in NVFP4; the scales are e4m3.

    Args:
        x: in blocks.
        axes: the dimensions within a block.
        scale: the float32 number that `nvfp4_scale` returns.
        noise: numbers in [0, 1) in the shape of `x`, for stochastic rounding; None rounds to the nearest, ties to even.
        peak_bits: as `mxfp8` takes them.
    """
    x = x.astype(jnp.float32)
    peak = lax.bitcast_convert_type(_peak_bits(x, axes) if peak_bits is None else peak_bits, jnp.float32)
    scales = jnp.clip(peak / E2M1_MOST / scale, 0, E4M3_MOST).astype(jnp.float8_e4m3fn)
    factor = scales.astype(jnp.float32) * scale
    elements = e2m1(jnp.where(factor == 0, 0, x / jnp.where(factor == 0, 1, factor)), noise)
    return Blocks(elements, scales)


def _peak_bits(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the bits of the largest magnitude; those of NaN, which some compilers' maximum drops, are the largest."""
    return size_bits(x).max(axes, keepdims=True)


def size_bits(x: jax.Array) -> jax.Array:
    """Return the bits of the magnitudes of float32 numbers, which as integers have the same order."""
    return lax.bitcast_convert_type(jnp.abs(x), jnp.uint32)


def nvfp4_scale(peak: jax.Array) -> jax.Array:
    """Return the float32 scale of a whole array with this largest magnitude, so that all scales of blocks fit e4m3."""
    peak = peak.astype(jnp.float32)
    scale = peak / (E2M1_MOST * E4M3_MOST)
    return jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)


def e2m1(x: jax.Array, noise: jax.Array | None = None) -> jax.Array:
    """Return the numbers of e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) that `x` rounds to, in float32.

    With `noise`, that above or below, so that the expected value is x itself.
    """
    size = jnp.minimum(jnp.abs(x), E2M1_MOST)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    steps = size / step
    if noise is None:
        steps = jnp.round(steps)
    else:
        low = jnp.floor(steps)
        steps = low + (noise < steps - low)
    return jnp.where(jnp.isnan(x), x, jnp.sign(x) * steps * step)


def hadamard(seed: int = 0) -> np.ndarray:
    """Return an orthogonal matrix [16, 16] of +-1/4: a Hadamard matrix whose rows have random signs."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < NV_BLOCK:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), (NV_BLOCK, 1))
    return signs * matrix / NV_BLOCK**0.5
