"""The refusal of a state that a step cannot take."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from tests.numerics import reference


@pytest.fixture(scope="module")
def run():
    return jt.build(reference.tiny("gpt2", mesh__data=8))


def test_a_state_that_was_used_up_is_refused(run):
    """XLA would end the process on eight virtual devices."""
    state, batch = run.init(), reference.batch(0)
    after, _ = run.step(state, batch)
    for again in (run, run.sharded):
        with pytest.raises(jt.UserError, match="state: its memory was donated to an earlier step"):
            (again.step if again is run else again)(state, batch)
    run.step(after, batch)


def test_a_state_of_another_mesh_is_refused_and_can_be_moved(run):
    other = jt.build(reference.tiny("gpt2", mesh__data=2, mesh__fsdp=4))
    batch = reference.batch(0)
    with pytest.raises(jt.UserError, match=r"state: .* lies on the devices as .*; move it with adopt"):
        run.step(other.init(), batch)
    moved = run.sharded.adopt(other.init())
    assert jax.tree.map(lambda x: x.sharding, moved) == jax.tree.map(lambda x: x.sharding, run.abstract)
    np.testing.assert_allclose(run.step(moved, batch)[1]["loss"], run.step(run.init(), batch)[1]["loss"], rtol=1e-6)


def test_the_state_of_another_model_is_refused(run):
    other = jt.build(reference.tiny("llama", mesh__data=8)).abstract
    state = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), other)
    with pytest.raises(jt.UserError, match="state: its parameters or optimizer state are not those of this run"):
        run.step(state, reference.batch(0))
