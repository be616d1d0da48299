"""The first operation at which two programs part, of small functions whose cause is known."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.bisection.first_difference import difference
from jaxtrain.bisection.operations import trace
from tests.tiny import devices

KERNELS = np.random.default_rng(0).normal(size=(3, 4, 4)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)


def normed(x, eps=1e-5):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)


def layers(x, kernels, eps=1e-5, activation=jnp.tanh, unrolled=False):
    def layer(x, kernel):
        return x + activation(normed(x, eps) @ kernel), None

    return jax.lax.scan(layer, x, kernels, unroll=3)[0] if not unrolled else _unrolled(layer, x, kernels)


def _unrolled(layer, x, kernels):
    for kernel in kernels:
        x, _ = layer(x, kernel)
    return x


def step(x, kernels, rate=0.1, **keys):
    loss, gradient = jax.value_and_grad(lambda kernels: jnp.square(layers(x, kernels, **keys)).sum())(kernels)
    return loss, kernels - rate * gradient


def traced(function, **keys):
    with devices(1):
        closed = jax.make_jaxpr(lambda x, kernels: function(x, kernels, **keys))(X, KERNELS)
        return trace(closed, (X, KERNELS), ["the loss", "kernels"], layers=3)


@pytest.fixture(scope="module")
def plain():
    return traced(step)


def test_an_operation_in_a_layer(plain):
    found = difference(plain, traced(step, eps=2e-5))
    for one, eps in zip(found.of, ("1e-05", "2e-05"), strict=True):
        assert one.name == "add" and one.where == "layer 1 of 3" and f"{float(one.constants[0]):.0e}" == eps
        assert "test_operations.py" in one.source and "normed" in one.source
    assert found.results == ["the loss", "kernels"]
    found = difference(plain, traced(step, activation=jnp.sin))
    assert [one.name for one in found.of] == ["tanh", "sin"] and found.of[0].where == "layer 1 of 3"


def test_what_comes_after_is_found_behind_what_is_the_same(plain):
    found = difference(plain, traced(step, rate=0.1001))
    assert found.results == ["kernels"]
    assert [one.name for one in found.of] == ["mul", "mul"] and "step" in found.of[0].source


def test_a_backward_pass_alone(plain):
    @jax.custom_jvp
    def tanh(x):
        return jnp.tanh(x)

    tanh.defjvp(lambda primals, tangents: (jnp.tanh(*primals), 1.01 * (1 - jnp.tanh(*primals)**2) * tangents[0]))
    found = difference(plain, traced(step, activation=tanh))
    assert found.results == ["kernels"]
    assert "layer" in found.of[1].where and "test_operations.py" in found.of[1].source


@pytest.mark.parametrize("other", [
    lambda x, kernels: step(x, kernels, unrolled=True),
    lambda x, kernels: jax.jit(step)(x, kernels),
    lambda x, kernels: jax.checkpoint(step)(x, kernels),
    lambda x, kernels: step(x, kernels, activation=lambda y: 2 * jax.nn.sigmoid(2 * y) - 1)],
    ids=["unrolled", "compiled", "rematerialised", "another way"])
def test_other_ways_to_the_same_numbers(plain, other):
    assert difference(plain, traced(other)) is None


def test_narrow_numbers_are_rounding():
    def narrow(x, kernels):
        x, kernels = x.astype(jnp.bfloat16), kernels.astype(jnp.bfloat16)
        return (x @ kernels[0]).astype(jnp.float32).sum(), kernels.astype(jnp.float32)

    assert difference(traced(narrow), traced(lambda x, kernels: ((x @ kernels[0]).sum(), kernels))) is None


def test_what_is_zero_but_for_rounding_is_no_difference():
    """The gradient of a bias under softmax is a sum that cancels; its order of summation decides what is left of it."""
    def one(x, kernels):
        bias = jax.grad(lambda b: (jax.nn.softmax(x @ kernels[0] + b) * x).sum())(0.0)
        return x.sum(), bias / (jnp.abs(bias) + 1e-30)

    def other(x, kernels):
        bias = jax.grad(lambda b: (jax.nn.softmax((x[::-1] @ kernels[0])[::-1] + b) * x).sum())(0.0) * 3
        return x.sum(), bias / (jnp.abs(bias) + 1e-30)

    assert difference(traced(one), traced(other)) is None


def test_not_a_number_is_a_number_here():
    nan = traced(lambda x, kernels: (jnp.log(-jnp.abs(x)).sum(), kernels))
    assert difference(nan, traced(lambda x, kernels: (jnp.log(-jnp.abs(x)).sum(), kernels))) is None
    assert difference(nan, traced(lambda x, kernels: (jnp.log(jnp.abs(x)).sum(), kernels))).of[0].name == "neg"


def test_it_comes_through_a_pipe(plain):
    again = pickle.loads(pickle.dumps(plain))
    assert difference(plain, again) is None
    found = difference(again, pickle.loads(pickle.dumps(traced(step, eps=2e-5))))
    assert [one.name for one in found.of] == ["add", "add"]
