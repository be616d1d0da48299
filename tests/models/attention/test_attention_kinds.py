"""Kinds of attention are Attention with all its options, where they do what it does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.models.attention.by_layer.late_window import LateWindowAttention
from jaxtrain.models.attention.by_layer.window_pattern import WindowPatternAttention
from jaxtrain.models.attention.clipped import ClippedAttention
from jaxtrain.models.attention.rotary import Rotary, frequencies
from jaxtrain.models.attention.self_attention import Attention


@pytest.mark.parametrize(("kind", "first", "numbered"), [
    (WindowPatternAttention, "L", True), (LateWindowAttention, 0, True), (ClippedAttention, 1e6, False)])
def test_a_gate_is_applied_as_in_plain_attention(kind, first, numbered):
    shape = dict(dim=16, heads=4, kv_heads=2, head_dim=8, out_std=0.3, window=3, gated=True)
    plain, own = (make(rngs=nnx.Rngs(params=0), **shape) for make in (Attention, lambda **how: kind(first, **how)))
    own.gate.kernel.set_value(own.gate.kernel.get_value() + 1.0)
    plain.gate.kernel.set_value(own.gate.kernel.get_value())
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 16)), jnp.float32)
    angles = Rotary(frequencies(8, 100.0)).angles(jnp.broadcast_to(jnp.arange(6), (2, 6)))
    layer = [jnp.asarray(0)] * numbered
    both = [jax.jit(lambda x, angles, at=at, of=of: of(x, None, angles, *at)[0])(x, angles)
            for of, at in ((plain, []), (own, layer))]
    np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-6)
