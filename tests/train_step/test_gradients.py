"""The work that the loop over micro-batches does each time, and once; and gradients of complex numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import subjaxprs

import jaxtrain as jt
from jaxtrain.run import shapes_of
from tests.numerics import reference

MICRO_BATCHES, LAYERS = 2, 3


def of_stacks(name, jaxpr, inside=False):
    """Return of the operations that give an array of all layers in bfloat16 which are in the loop over micro-batches.
    """
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name and eqn.outvars[0].aval.dtype == jnp.bfloat16:
            shape = eqn.invars[0].aval.shape
            found += [inside] if len(shape) > 2 and shape[0] == LAYERS else []
    for inner in subjaxprs(jaxpr):
        loops = any(eqn.primitive.name == "scan" and eqn.params["length"] == MICRO_BATCHES
                    and eqn.params["jaxpr"].jaxpr is inner for eqn in jaxpr.eqns)
        found += of_stacks(name, inner, inside or loops)
    return found


def test_weights_are_cast_once_for_all_micro_batches():
    run = reference.build("llama", (1, 8, 1), train__precision="bfloat16", train__accumulation=MICRO_BATCHES,
                          model__num_layers=LAYERS)
    program = run.sharded.trace(shapes_of(run).abstract()).jaxpr.jaxpr
    matrices = [p for p in jax.tree.leaves(run.abstract.params) if p.ndim > 2]
    assert of_stacks("convert_element_type", program) == [False] * len(matrices)
    assert sum(of_stacks("reshard", program)) >= len(matrices)  # in the loop, where arrays are gathered


def complex_loss(params, batch):
    return jnp.abs(batch["x"] @ params["w"] - batch["y"]).mean()


def complex_parts():
    draw = np.random.default_rng(0)
    w = (draw.standard_normal((8, 4)) + 2j * draw.standard_normal((8, 4))).astype(np.complex64)
    return {"w": w}, {"x": draw.standard_normal((16, 8)).astype(np.float32),
                      "y": (1j * draw.standard_normal((16, 4))).astype(np.complex64)}


@pytest.mark.parametrize(("accumulation", "precision"), [(1, "float32"), (2, "float32"), (2, "float16")])
def test_gradients_of_complex_parameters_keep_their_imaginary_part(accumulation, precision):
    """Summed over micro-batches, divided by the scale of a loss, and clipped by a norm of both parts."""
    params, batch = complex_parts()
    want = np.asarray(jax.grad(complex_loss)(params, batch)["w"])
    norm = float(np.linalg.norm(want))
    step = jt.make_train_step(complex_loss, optax.sgd(1.0), mesh=jt.make_mesh(data=2), accumulation=accumulation,
                              clip_norm=norm / 2, precision=precision)
    state, metrics = step(step.init(lambda: jax.tree.map(jnp.asarray, params)), batch)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=2e-3)
    np.testing.assert_allclose(params["w"] - jax.device_get(state.params["w"]), want / 2, atol=1e-3 * norm)
