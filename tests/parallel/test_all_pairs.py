"""Losses of all pairs: values and gradients of the whole matrix on one device, on any mesh, and never that matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.parallel.all_pairs import all_pairs, count_matched
from jaxtrain.sharding import axis_rules, mesh_context
from jaxtrain.sharding.mesh import make_mesh

ROWS, SLOTS, WIDTH = 8, 8, 6
MESHES = {"one device": {}, "data": dict(data=8), "data, fsdp, tensor": dict(data=2, fsdp=2, tensor=2),
          "context, tensor": dict(context=2, tensor=4), "expert": dict(expert=2, fsdp=4)}


def made():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, ROWS, SLOTS, WIDTH)).astype(np.float32)
    there = (np.arange(SLOTS) < rng.integers(0, SLOTS + 1, (ROWS, 1))).astype(np.float32)
    labels = rng.integers(3, size=(ROWS, SLOTS)).astype(np.int32)
    return x, y, there, labels, np.float32(1.7), np.float32(-2.5)


def plain(kind, x, y, there, scale, bias):
    """The formulas of the papers over the matrix of all pairs that are there."""
    chosen = np.flatnonzero(there)
    x, y = (a.reshape(-1, WIDTH)[chosen] for a in (x, y))
    logits = scale * x @ y.T + bias
    if kind == "sigmoid":
        signs = 2 * jnp.eye(len(chosen)) - 1
        return jnp.log(1 + jnp.exp(-signs * logits)).sum()
    rows, columns = (jnp.log(jnp.exp(logits).sum(axis)) for axis in (1, 0))
    return ((rows + columns) / 2 - jnp.diagonal(logits)).sum()


def on_mesh(axes):
    size = int(np.prod(list(axes.values()) or [1]))
    return make_mesh(**({"data": 1} | axes), devices=jax.devices()[:size]), axis_rules.rules()


@pytest.mark.parametrize("mesh", [
    name if name == "data, fsdp, tensor" else pytest.param(name, marks=pytest.mark.exhaustive) for name in MESHES])
@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
def test_loss_and_gradients_are_those_of_the_whole_matrix(kind, mesh):
    x, y, there, labels, scale, bias = made()
    want, grads = jax.value_and_grad(
        lambda x, y, scale, bias: plain(kind, x, y, there, scale, bias), (0, 1, 2, 3))(x, y, scale, bias)
    with mesh_context.use(*on_mesh(MESHES[mesh])):
        gradient = jax.jit(jax.value_and_grad(
            lambda x, y, s, b: all_pairs(kind, x, y, there, (s, b)), (0, 1, 2, 3))).lower(x, y, scale, bias).compile()
        got, found = gradient(x, y, scale, bias)
        matched = jax.jit(count_matched)(x, y, there, labels)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for g, w in zip(found, grads, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5 * max(1, float(jnp.abs(w).max())))
    if mesh != "one device":
        whole = ROWS * SLOTS
        assert f"[{whole // 8},{whole // 8}]" in gradient.as_text(), "the search below finds nothing"
        assert f"{whole},{whole}]" not in gradient.as_text()
    chosen = np.flatnonzero(there)
    near = (x.reshape(-1, WIDTH)[chosen] @ y.reshape(-1, WIDTH)[chosen].T).argmax(1)
    assert float(matched) == (labels.reshape(-1)[chosen][near] == labels.reshape(-1)[chosen]).sum()
