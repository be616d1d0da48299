"""Embedding lookup on any mesh, and its gradient, in which frequent tokens add up many rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.parallel.vocab import lookup
from jaxtrain.sharding import activations, mesh_context

B, T, D, V = 8, 512, 16, 64
MESHES = {"none": None, "one": {}, "batch": dict(data=2, fsdp=4), "vocab": dict(tensor=8),
          "both": dict(data=2, fsdp=2, tensor=2), "sequence": dict(fsdp=2, context=2, tensor=2)}


@functools.cache
def inputs():
    """Return a table, tokens of which most are the same, and a gradient of the looked-up rows."""
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random((B, T)) < 0.9, 5, rng.integers(V, size=(B, T)))
    return (rng.normal(size=(V, D)).astype(np.float32), tokens.astype(np.int32),
            rng.uniform(0.5, 1.5, size=(B, T, D)).astype(np.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("mesh", MESHES)
def test_rows_and_the_gradient_of_the_table(mesh, dtype):
    table, tokens, dx = map(jnp.asarray, inputs())
    table, dx = table.astype(dtype), dx.astype(dtype)
    expected = np.zeros((V, D))
    np.add.at(expected, np.asarray(tokens), np.asarray(dx, np.float64))
    if MESHES[mesh] is None:
        rows, pull = jax.vjp(lambda table: lookup(table, tokens), table)
        gradient, = pull(dx)
    else:
        with mesh_context.use(jt.make_mesh(**MESHES[mesh]), jt.rules("fsdp_tp")):
            table_VD = activations.constrain(table, "vocab", "embed")
            tokens_BT = activations.constrain(tokens, "batch", "seq")
            dx_BTD = activations.constrain(dx, "batch", "block_seq", "act_embed")

            @jax.jit
            def both(table, tokens, dx):
                rows, pull = jax.vjp(lambda table: lookup(table, tokens), table)
                return rows, *pull(dx)
            rows, gradient = both(table_VD, tokens_BT, dx_BTD)
            assert jax.typeof(gradient).sharding.spec == jax.typeof(table_VD).sharding.spec
    np.testing.assert_array_equal(np.asarray(rows), np.asarray(table)[np.asarray(tokens)])
    assert gradient.dtype == dtype
    # In bfloat16 each device rounds its sum once, and so does the sum over devices; 3,720 additions one by one
    # keep 14 % of the sum.
    np.testing.assert_allclose(np.asarray(gradient, np.float64), expected, rtol=1e-5 if dtype == jnp.float32 else 0.012)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["none", "batch"])
def test_ids_of_any_dtype_and_from_the_end(mesh):
    """Bytes, which do not hold the number of all rows, and negative ids, which indexing counts from the end."""
    table = jnp.arange(256.0 * D).reshape(256, D)
    for tokens in (np.full((B, 2), 5, np.uint8), np.full((B, 2), -251, np.int32)):
        def rows(table):
            return lookup(table, jnp.asarray(tokens))

        if MESHES[mesh] is None:
            found, pull = jax.vjp(rows, table)
            gradient, = pull(jnp.ones_like(found))
        else:
            with mesh_context.use(jt.make_mesh(**MESHES[mesh]), jt.rules("fsdp_tp")):
                found, pull = jax.vjp(rows, activations.constrain(table, "vocab", "embed"))
                gradient, = pull(jnp.ones_like(found))
        assert (np.asarray(found) == np.asarray(table[5])).all()
        assert np.asarray(gradient).sum(1).nonzero()[0].tolist() == [5] and np.asarray(gradient)[5, 0] == 2 * B


def test_the_sum_of_rows_does_not_share_its_zeros():
    """Merged with other zeros they would be in memory from where those begin."""
    table, tokens, dx = map(jnp.asarray, inputs())
    program = jax.make_jaxpr(lambda dx: jax.vjp(lambda table: lookup(table, tokens), table)[1](dx))(dx)
    scatter = next(eqn for eqn in program.eqns if eqn.primitive.name == "scatter-add")
    made = next(eqn for eqn in program.eqns if scatter.invars[0] in eqn.outvars)
    assert made.primitive.name == "optimization_barrier"
    assert program.jaxpr.invars[0] in made.invars  # not before there is something to add
