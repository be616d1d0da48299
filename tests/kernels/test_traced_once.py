"""Kernels are traced and lowered once for each shape, not for each layer that calls them."""

import jax
import jax.numpy as jnp

from jaxtrain.kernels.attention import mosaic_attention
from jaxtrain.kernels.traced_once import traced_once
from tests.kernels.interpreted import needs_mosaic


def test_equal_calls_share_one_trace():
    traced = []

    def kernel(x, *, scale, name):
        traced.append((x.shape, scale))
        return x * scale

    def layers(x, y):
        told = {"name": "kernel", "interpret": None}
        for _ in range(3):
            x, y = traced_once(kernel, x, scale=2.0, **told), traced_once(kernel, y, scale=2.0, **told)
        return x, traced_once(kernel, y, scale=3.0, **told)

    x, y = jax.jit(layers)(jnp.ones(4), jnp.ones(2))
    assert traced == [((4,), 2.0), ((2,), 2.0), ((2,), 3.0)]
    assert x[0] == 8 and y[0] == 24


@needs_mosaic
def test_layers_of_a_pattern_lower_one_kernel():
    """Two with different windows, which are no part of the kernel: what queries see is an argument."""
    def layers(q, segments):
        for window in (64, 0, 64):
            q = mosaic_attention.attention(q, q, q, segments, window, 0.0)
        return q

    q, segments = jax.ShapeDtypeStruct((1, 256, 1, 64), jnp.bfloat16), jax.ShapeDtypeStruct((1, 256), jnp.int32)
    text = jax.jit(layers).trace(q, segments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
