"""MXFP8 and NVFP4 against ml_dtypes and the published formulas, computed in NumPy in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxtrain.sharding import block_formats

RNG = np.random.default_rng(0)


def edges(width):
    """Blocks of many sizes, and those of zeros, the largest and smallest numbers, and peaks between two scales."""
    x = RNG.standard_normal((256, width)) * np.exp2(RNG.integers(-80, 100, (256, 1)))
    x[0], x[1], x[2], x[3] = 0, 3e38, 448, 448.00003
    x[4], x[5, 1:] = 1.75 * 2.0**-20, 2.0**-60  # a peak that needs no power more; elements far below a peak
    x[6] = 2.0 ** -np.arange(width)  # subnormal elements
    return x.astype(np.float32)


def test_mxfp8_is_what_the_specification_says():
    x = edges(32)
    found = jax.jit(lambda x: block_formats.mxfp8(x, (1,)))(x)
    peak = np.abs(x).max(1, keepdims=True).astype(np.float64)
    with np.errstate(divide="ignore"):
        exponent = np.clip(np.ceil(np.log2(peak / 448)), -127, 127)
    elements = (x / np.exp2(exponent)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(found.scales, exponent + 127)
    np.testing.assert_array_equal(found.elements, elements)
    np.testing.assert_array_equal(found.values, elements * np.exp2(exponent))
    scales = np.asarray(found.scales).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(scales, np.exp2(exponent))
    # A bfloat16 array holds every value: this is why products can be computed elsewhere.
    np.testing.assert_array_equal(found.values.astype(jnp.bfloat16).astype(jnp.float32), found.values)


def test_nvfp4_is_what_the_paper_says():
    x = edges(16)
    x[1] = 0  # one scale for all: 3e38 would leave nothing else
    x /= np.float32(2.0**60)
    peak = np.abs(x).max()
    scale = np.float32(peak / np.float32(6 * 448))
    found = jax.jit(lambda x: block_formats.nvfp4(x, (1,), block_formats.nvfp4_scale(jnp.abs(x).max())))(x)
    scales = np.minimum(np.abs(x).max(1, keepdims=True) / np.float32(6) / scale, 448).astype(ml_dtypes.float8_e4m3fn)
    factor = scales.astype(np.float32) * scale
    ratio = np.divide(x, factor, out=np.zeros_like(x), where=factor != 0)
    elements = np.clip(ratio, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(found.scales, np.float32), scales.astype(np.float32))
    np.testing.assert_array_equal(found.elements, elements)
    np.testing.assert_array_equal(found.values, elements * scales.astype(np.float32))
    np.testing.assert_array_equal(found.values.astype(jnp.bfloat16).astype(jnp.float32), found.values)
    normal = scales[:, 0].astype(np.float32) >= 2.0**-6  # below, a scale has fewer bits
    error = np.abs(np.asarray(found.values) * scale - x)[normal]
    assert normal.any() and (error <= 0.25 * np.abs(x).max(1, keepdims=True)[normal]).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_number_that_is_not_finite_is_kept_so(bad):
    x = np.ones((2, 32), np.float32)
    x[1, 3] = bad
    found = jax.jit(lambda x: block_formats.mxfp8(x, (1,)))(x)
    assert np.isfinite(found.values[0]).all() and np.isnan(found.values[1]).all() and found.scales[1, 0] == 255
    x = x.reshape(4, 16)
    found = jax.jit(lambda x: block_formats.nvfp4(x, (1,), block_formats.nvfp4_scale(jnp.abs(x).max())))(x)
    assert not np.isfinite(found.values[2]).all()


def test_e2m1_rounds_to_the_nearest_number_and_ties_to_even():
    x = np.concatenate([np.linspace(-7, 7, 1121), [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.0]]).astype(np.float32)
    want = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(block_formats.e2m1(jnp.asarray(x)), want)


def test_stochastic_rounding_keeps_the_mean_and_numbers_of_the_grid():
    x = np.linspace(-6, 6, 97).astype(np.float32)  # each multiple of 1/8
    noise = ((np.arange(4096) + 0.5) / 4096).astype(np.float32)[:, None]
    found = np.asarray(block_formats.e2m1(jnp.broadcast_to(x, (4096, 97)), jnp.broadcast_to(noise, (4096, 97))))
    np.testing.assert_allclose(found.mean(0), x, atol=1e-6)
    grid = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert set(np.abs(found).ravel()) <= {*grid}
    on_grid = np.isin(np.abs(x), grid)
    np.testing.assert_array_equal(found[:, on_grid], np.broadcast_to(x[on_grid], found[:, on_grid].shape))


def test_the_hadamard_matrix_is_orthogonal_and_spreads_an_outlier():
    matrix = block_formats.hadamard()
    np.testing.assert_array_equal(matrix @ matrix.T, np.eye(16))
    np.testing.assert_array_equal(np.abs(matrix), 0.25)
    assert len({*map(tuple, np.sign(matrix))}) == 16 and (matrix[:, 0] < 0).any()
