"""The work that the loop over micro-batches does each time, and once."""

import jax
import jax.numpy as jnp
from jax.extend.core import subjaxprs

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
