"""Gradients of weights come before the backward pass goes on; of frozen ones there are none."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import jaxprs_in_params

from jaxtrain.models.gradient_order import gradients_first
from jaxtrain.models.layer_groups import Group

LAYERS, WIDTH = 3, 4


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.outer = (nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH))) for _ in range(2))

    def __call__(self, x, segments, angles):
        return jnp.tanh(x @ self.inner[...]) @ self.outer[...], {}


def of(frozen):
    """Return the loss of a group, its trained and frozen weights, and an input."""
    group = Group([Layer] * LAYERS, jax.checkpoint, nnx.Rngs(params=0))
    graphdef, weights = nnx.split(group)
    weights = nnx.to_pure_dict(weights)
    frozen = {layer: {name: each.pop(name) for name in frozen} for layer, each in weights.items()}

    def loss(weights, frozen, x):
        whole = {layer: weights[layer] | frozen[layer] for layer in weights}
        return jnp.square(nnx.merge(graphdef, nnx.State(whole))(x, None, None)[0]).sum()

    return loss, weights, frozen, jnp.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)


def operations(jaxpr, found):
    for eqn in jaxpr.eqns:
        found.append(eqn)
        for inner in jaxprs_in_params(eqn.params):
            operations(inner, found)
    return found


def backward(*frozen):
    loss, *arguments = of(frozen)
    return operations(jax.make_jaxpr(jax.grad(loss))(*arguments).jaxpr, [])


def test_each_layer_waits_for_the_gradients_of_the_one_after_it():
    barriers = [eqn for eqn in backward() if eqn.primitive.name == "optimization_barrier"
                and [v.aval.shape for v in eqn.invars].count((WIDTH, WIDTH)) == 2]
    assert len(barriers) == LAYERS


def test_frozen_weights_have_no_gradients():
    products = [sum(eqn.primitive.name == "dot_general" for eqn in backward(*frozen)) for frozen in ((), ("outer",))]
    assert products[0] - products[1] >= LAYERS


def test_values_and_derivatives_are_those_without_it():
    def loss(scale, ordered):
        x, w = jnp.ones((2, WIDTH)), {"w": scale * jnp.eye(WIDTH)}
        x, w = gradients_first(x, w) if ordered else (x, w)
        return jnp.tanh(x @ w["w"]).sum()

    for way in (lambda f: f, jax.grad, jax.hessian):
        got, want = (jax.vmap(way(lambda scale, ordered=ordered: loss(scale, ordered)))(jnp.linspace(0.5, 1, 3))
                     for ordered in (True, False))
        np.testing.assert_allclose(got, want, rtol=1e-6)
