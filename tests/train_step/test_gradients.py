"""What the loop over micro-batches computes each time, and what once."""

import jax
import jax.numpy as jnp
from jax.extend.core import subjaxprs

from tests.numerics import reference

MICRO_BATCHES, LAYERS = 2, 3


def stacked_casts(jaxpr, inside=False):
    """Return the casts of arrays of all layers to bfloat16, and whether each is in the loop over micro-batches."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == jnp.bfloat16:
            shape = eqn.invars[0].aval.shape
            found += [(inside, shape)] if len(shape) > 2 and shape[0] == LAYERS else []
    for inner in subjaxprs(jaxpr):
        loops = any(eqn.primitive.name == "scan" and eqn.params["length"] == MICRO_BATCHES
                    and eqn.params["jaxpr"].jaxpr is inner for eqn in jaxpr.eqns)
        found += stacked_casts(inner, inside or loops)
    return found


def test_weights_are_cast_once_for_all_micro_batches():
    run = reference.build("llama", train__precision="bfloat16", train__accumulation=MICRO_BATCHES,
                          model__num_layers=LAYERS)
    casts, matrices = stacked_casts(run.trace().jaxpr.jaxpr), [
        p for p in jax.tree.leaves(run.abstract.params) if p.ndim > 2]
    assert len(casts) == len(matrices) == 7
    assert not any(inside for inside, _ in casts)
