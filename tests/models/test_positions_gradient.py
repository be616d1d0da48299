"""The gradient of learned positions, in which each row adds up all sequences of a batch."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.models.layers import LearnedPositions


def test_it_is_summed_in_float32_though_the_table_is_cast_to_bfloat16():
    rows, length, dim = 512, 4, 8
    module = LearnedPositions(length, dim, rngs=nnx.Rngs(params=0))
    positions = jnp.tile(jnp.arange(length), (rows, 1))
    definition, params = nnx.split(module)
    dx = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, (rows, length, dim)), jnp.bfloat16)

    given = jax.tree.map(lambda table: table.astype(jnp.bfloat16), params)
    found, pull = jax.vjp(lambda params: nnx.merge(definition, params)(positions), given)
    np.testing.assert_array_equal(found, jax.tree.leaves(given)[0][positions])
    gradient, = jax.tree.leaves(pull(dx))
    assert found.dtype == gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(gradient, np.float32), dx.astype(jnp.float32).sum(0), rtol=2**-8)
