"""Experts in fp8: every product of them is that of independently rounded factors, on one device and on meshes."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jaxtrain as jt
from jaxtrain.parallel.experts import through_experts
from jaxtrain.sharding import axis_rules, mesh_context, products
from jaxtrain.train_step.state import Skeleton
from tests.models.experts.test_moe import CONFIGS, close, emulated, gradients, in_order, initial, inputs, layer, placed

SLOW = pytest.mark.slow
N, D, F, E, K = 24, 16, 8, 4, 2
E4M3, E5M2 = (ml_dtypes.float8_e4m3fn, 448), (ml_dtypes.float8_e5m2, 57344)


def rounded(a, kind):
    """Return the array rounded by another library, whose conversion is not XLA's; as numbers of float64."""
    dtype, most = kind
    scale = np.float32(np.abs(a).max() / most)
    return np.clip(a.astype(np.float32) / scale, -most, most).astype(dtype).astype(np.float64) * scale


def plain(x, chosen, weights, gate, up, down, dy):
    """The layer's result and the gradients of tokens, weights and matrices; one row for each choice of a token."""
    row = np.repeat(np.arange(N), K)
    x_R, w_R, e_R, dy_R = rounded(x, E4M3)[row], weights.reshape(-1, 1), chosen.reshape(-1), rounded(dy, E5M2)[row]
    gate, up, down = (rounded(a, E4M3) for a in (gate, up, down))

    def rows(a_R, matrices):
        return np.einsum("rk,rkn->rn", a_R, matrices[e_R])

    def by_expert(a_R, b_R):
        return np.stack([a_R[e_R == e].T @ b_R[e_R == e] for e in range(E)])

    def by_token(a_R):
        return a_R.reshape(N, K, -1).sum(1)

    g_R, u_R = rows(x_R, gate), rows(x_R, up)
    sigmoid = 1 / (1 + np.exp(-g_R))
    act_R = rounded(g_R * sigmoid * u_R * w_R, E4M3)
    dact_R = rows(dy_R, down.transpose(0, 2, 1))
    dweights = (dact_R * g_R * sigmoid * u_R).sum(1).reshape(N, K)
    dg_R = rounded(dact_R * w_R * u_R * sigmoid * (1 + g_R * (1 - sigmoid)), E5M2)
    du_R = rounded(dact_R * w_R * g_R * sigmoid, E5M2)
    dx = by_token(rows(dg_R, gate.transpose(0, 2, 1)) + rows(du_R, up.transpose(0, 2, 1)))
    return (by_token(rows(act_R, down)), dx, dweights, by_expert(x_R, dg_R), by_expert(x_R, du_R),
            by_expert(act_R, dy_R))


def drawn():
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, N, D)).astype(np.float32)
    matrices = [rng.standard_normal(shape).astype(np.float32) / 4 for shape in ((E, D, F), (E, D, F), (E, F, D))]
    chosen = np.stack([rng.permutation(E - 1)[:K] for _ in range(N)])  # one expert has no token
    return x, chosen, rng.random((N, K)).astype(np.float32), *matrices, dy


def test_all_nine_products_are_those_of_rounded_factors():
    x, chosen, weights, *matrices, dy = drawn()

    def run(x, weights, *matrices):
        matrices = [products.Rounded(*products.sent(m), m.dtype) for m in matrices]
        return through_experts(x, jnp.asarray(chosen), weights, jnp.ones((N, K), bool), *matrices)

    with products.in_precision("fp8"):
        y, pull = jax.vjp(jax.jit(run), x, weights, *matrices)
        found = (y, *pull(jnp.asarray(dy)))
    for name, got, want in zip(("y", "dx", "dweights", "dgate", "dup", "ddown"), found,
                               plain(x, chosen, weights, *matrices, dy), strict=True):
        # An element at the middle between two of 8 bits may fall to either side.
        np.testing.assert_allclose(got, want, atol=5e-3 * np.abs(want).max(), err_msg=name)
    assert np.abs(found[3][E - 1]).max() == 0 and np.abs(found[1]).max() > 0


@functools.cache
def alone(name):
    """Value, totals and gradients on one device."""
    module = Skeleton.of(layer(CONFIGS[name]))
    with products.in_precision("fp8"):
        return jax.device_get(jax.jit(gradients(module))(initial(module), *inputs()))


@pytest.mark.parametrize(("name", "exchange", "sizes"), [
    pytest.param(*case, marks=SLOW if n < 1 else pytest.mark.exhaustive) for n, case in enumerate((
        ("softmax", "ragged", dict(expert=4, fsdp=2)), ("biased", "gather", dict(expert=2, context=2, tensor=2)),
        ("capacity", "gather", dict(fsdp=2, expert=2)), ("sigmoid", "gather", dict(expert=2, tensor=4)),
        ("biased", "ragged", dict(expert=4, tensor=2))))], ids=str)
def test_any_mesh_gives_the_numbers_of_one_device(name, exchange, sizes, monkeypatch):
    """A scale is that of all rows on all devices."""
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated)
    want, module = alone(name), Skeleton.of(layer(CONFIGS[name], exchange, 0.0))
    rules, mesh = axis_rules.rules(), jt.make_mesh(**sizes)
    with mesh_context.use(mesh, rules), products.in_precision("fp8"):
        lowered = jax.jit(gradients(module)).lower(*placed(module, mesh, rules))
        close(in_order(lowered.compile()(*placed(module, mesh, rules)), mesh), want, tolerance=1e-3)
    # Tokens cross as one byte for each number, and so does what comes back to them, where it is sent.
    text = lowered.as_text()
    for kind in ("xf8E4M3FN", "xf8E5M2")[: 1 if exchange == "gather" else 2]:
        assert re.search(rf"all_gather.*{kind}", text)


@pytest.mark.exhaustive
def test_rows_that_the_buffer_does_not_hold_take_further_passes():
    """Each with a scale for its rows of what is between two products; tokens and what comes back have one for all."""
    want, module = alone("softmax"), Skeleton.of(layer(CONFIGS["softmax"], "gather", 0.3))
    rules, mesh = axis_rules.rules(), jt.make_mesh(expert=2)
    with mesh_context.use(mesh, rules), products.in_precision("fp8"):
        close(in_order(jax.jit(gradients(module))(*placed(module, mesh, rules)), mesh), want, tolerance=0.1)
