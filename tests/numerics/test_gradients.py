"""`run.value_and_grad` and `run.with_params` on any layout against `jax.grad` of the plain loss on one device."""

import functools

import jax
import numpy as np
import pytest

import jaxtrain as jt
from tests.numerics import reference


@functools.cache
def plain():
    config = reference.tiny().model
    return jax.device_get(jax.jit(jax.value_and_grad(
        lambda params: reference.loss(config, params, reference.batch(0))))(reference.initial()))


@pytest.mark.parametrize(("mesh", "keys"), [
    pytest.param((2, 2, 2), dict(train__accumulation=2, optimizer__zero_stage=2), id="eight, accumulated"),
    pytest.param((2, 1, 1), dict(mesh__stage=2), id="pipeline", marks=pytest.mark.exhaustive),  # muP's tests have one
    pytest.param((1, 1, 1), dict(train__freeze="['blocks/*']"), id="frozen layers", marks=pytest.mark.slow),
])
def test_loss_and_gradient_are_those_of_one_device(mesh, keys):
    run = reference.build("gpt2", mesh, **keys)
    state = run.with_params(reference.initial())
    value, gradient = run.value_and_grad(state, reference.batch(0))
    want_value, want = plain()
    assert float(value) == pytest.approx(float(want_value), rel=1e-5)
    assert jax.tree.structure(gradient) == jax.tree.structure(state.params)
    error, leaf = reference.worst(jax.device_get(gradient), {key: want[key] for key in gradient}, floor=1e-4)
    assert error < 1e-5, f"the gradient of {leaf} is off by {error:.1e}"
    assert not state.step.is_deleted()  # nothing is donated


@pytest.mark.slow
def test_a_run_from_given_parameters_is_the_run_that_drew_them():
    run = reference.build("gpt2", (2, 2, 1))
    drawn = run.init()
    given = run.with_params(jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(drawn.params)))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(given), jax.device_get(drawn))
    assert all(a.sharding == b.sharding for a, b in zip(*map(jax.tree.leaves, (given, drawn)), strict=True))


@pytest.mark.parametrize(("change", "line"), [
    (lambda p: p.pop("positions"), "params: they lack positions/table; give every parameter of the model"),
    (lambda p: p.update(more=np.ones(2)), "params: they have more, which the model does not; leave it out"),
    (lambda p: p["embed"].update(table=np.ones((3, 4))), "params: embed/table has the shape [3, 4], and the model's "
     "[64, 32]; give parameters of this config's model"),
])
def test_other_parameters_are_refused(change, line):
    params = jax.tree.map(np.asarray, reference.initial())
    change(params)
    with pytest.raises(jt.UserError) as error:
        reference.build("gpt2").with_params(params)
    assert str(error.value) == line
