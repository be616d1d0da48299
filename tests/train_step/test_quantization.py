"""Weights in 8 and 4 bits: the nearest of the levels that exist, the same with NumPy and in a compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.train_step.quantization import BLOCK, dequantize, quantize, quantize_like, shape_of
from tests.numerics.plain_lora import LEVELS, dequantized

KINDS = ("int8", "nf4")
SHAPES = {"columns of two blocks": ((128, 6), 0), "a stack, in the middle": ((3, 192, 5), 1),
          "one small block": ((2, 4, 16), 2), "several small blocks": ((24, 3), 0)}


def weight(shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_each_value_becomes_the_nearest_level_of_its_block(name, kind):
    shape, d = SHAPES[name]
    w = weight(shape)
    values, scales = quantize(w, kind, d)
    got = dequantize(values, scales, np.float32)
    assert got.shape == shape == shape_of(values, scales)
    np.testing.assert_array_equal(got, dequantized(scales, jnp.asarray(values)))
    block = min(BLOCK, shape[d] & -shape[d])
    assert scales.shape[d] == shape[d] // block and values.size * (2 if kind == "nf4" else 1) == w.size
    levels = np.array(LEVELS, np.float32) if kind == "nf4" else np.arange(-127, 128, dtype=np.float32)
    each = np.repeat(scales.astype(np.float32), block, d)
    nearest = np.abs(w[..., None] - levels * each[..., None]).min(-1)
    np.testing.assert_allclose(np.abs(got - w), nearest, atol=1e-6 * np.abs(w).max())
    top = np.abs(w).max(d) / (1 if kind == "nf4" else 127)
    np.testing.assert_allclose(scales.astype(np.float32).max(d), top, rtol=2**-8)


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.0060), ("nf4", 0.0926)])
def test_what_is_lost_of_normally_distributed_weights(kind, error):
    """The root mean square of the error relative to that of the values, in blocks of 64."""
    w = weight((4096, 64))
    got = dequantize(*quantize(w, kind, 0), np.float32)
    assert np.sqrt(np.mean((got - w)**2)) == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_program_gives_the_bits_of_numpy(kind):
    w = weight((3, 128, 5))
    ours, compiled = quantize(w, kind, 1), jax.jit(quantize, static_argnums=(1, 2))(jnp.asarray(w), kind, 1)
    for a, b in zip(ours, compiled, strict=True):
        np.testing.assert_array_equal(a, b)
    for dtype in (jnp.float32, jnp.bfloat16):
        np.testing.assert_array_equal(dequantize(*ours, dtype), jax.jit(dequantize, static_argnums=2)(*compiled, dtype))
    abstract = jax.eval_shape(lambda w: quantize(w, kind, 1), jnp.asarray(w))
    for a, b in zip(quantize_like(*abstract, w), ours, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_and_what_is_not_finite_is_seen(kind):
    w = np.zeros((128, 2), np.float32)
    np.testing.assert_array_equal(dequantize(*quantize(w, kind, 0), np.float32), w)
    w[3, 1] = np.inf
    with np.errstate(invalid="ignore"):
        got = dequantize(*quantize(w, kind, 0), np.float32)
    assert not np.isfinite(got[:64, 1]).any() and np.isfinite(got[64:]).all() and np.isfinite(got[:, 0]).all()


def test_dimensions_without_blocks_are_refused():
    with pytest.raises(UserError, match=r"^lora.quantize: a weight of the shape \[10, 3\] has no dimension"):
        quantize(weight((10, 3)), "nf4", 0)
