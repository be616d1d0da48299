"""The router's product in three bfloat16 passes: as exact as float32, and with the routes of float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.models.experts.router_product import parts, router_product

TOKENS, DIM, EXPERTS, CHOSEN = 512, 256, 64, 8
EPSILON = 2.0**-24  # half a unit in the last place of float32


@pytest.fixture(scope="module")
def case():
    """Activations, kernel and what the logits are pulled by, their logits and gradients, and the same in float64."""
    rng = np.random.default_rng(0)
    x, kernel, pull = (rng.standard_normal(shape).astype(np.float32) for shape in (
        (1, TOKENS, DIM), (DIM, EXPERTS), (1, TOKENS, EXPERTS)))
    x = jnp.asarray(x * np.exp(rng.standard_normal(DIM)), jnp.bfloat16)  # some channels are much larger than others
    logits, back = jax.jit(lambda x, kernel: jax.vjp(router_product, x, kernel))(x, kernel * 0.02)
    found = logits, *jax.jit(lambda back, pull: back(pull))(back, pull)
    return [np.float64(a) for a in (x[0], kernel * 0.02, pull[0])], [np.asarray(a, np.float64) for a in found]


def test_three_bfloat16_parts_are_a_float32_number():
    a = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    found = jax.jit(parts)(a)
    assert {part.dtype for part in found} == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(sum(np.float64(part) for part in found), np.float64(a))


def test_logits_are_as_exact_as_in_float32(case):
    (x, kernel, _), (logits, *_) = case
    magnitude = np.abs(x) @ np.abs(kernel)  # what errors of a sum are in proportion to
    ours, plain = (np.abs(a - x @ kernel) / magnitude for a in (
        logits[0], np.float64(np.float32(x) @ np.float32(kernel))))
    assert ours.max() < 8 * EPSILON and ours.mean() < 2 * plain.mean() + EPSILON / 4
    two = sum(np.float64(np.float32(x) @ np.float32(part)) for part in parts(np.float32(kernel))[:2])
    assert (np.abs(two - x @ kernel) / magnitude).max() > 8 * EPSILON, "the bound would allow for two passes"


def test_routes_are_those_of_float64(case):
    (x, kernel, _), (logits, *_) = case
    found, want = (np.argsort(-a, -1)[:, :CHOSEN] for a in (logits[0], x @ kernel))
    np.testing.assert_array_equal(found, want)


def test_gradients_are_those_of_float64(case):
    """The kernel's is as exact as in float32; that of activations is one of the two nearest bfloat16 numbers."""
    (x, kernel, pull), (_, dx, dkernel) = case
    assert (np.abs(dkernel - x.T @ pull) / (np.abs(x.T) @ np.abs(pull))).max() < 8 * EPSILON
    want, scale = pull @ kernel.T, np.abs(pull) @ np.abs(kernel.T)
    assert (np.abs(dx[0] - want) <= 2.0**-8 * np.abs(want) + 2.0**-15 * scale).all()


def test_float32_activations_are_multiplied_in_float32():
    x, kernel = np.ones((1, 2, 8), np.float32), np.ones((8, 4), np.float32)
    text = str(jax.make_jaxpr(router_product)(x, kernel))
    assert "HIGHEST" in text and "bf16" not in text
    assert "HIGHEST" not in str(jax.make_jaxpr(router_product)(jnp.asarray(x, jnp.bfloat16), kernel))
