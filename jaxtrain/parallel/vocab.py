"""Embedding lookup on any mesh.

A vocabulary that is split over mesh axes is looked up by each device in the rows that it holds. The table's gradient is
accumulated in float32, since frequent tokens add up many rows, and summed over the batch's devices once, in the table's
dtype and directly into the layout that the table has at rest.

Shape suffixes: B batch, T sequence, D embedding, V vocabulary.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.sharding import activations, axis_rules
from jaxtrain.sharding.axis_rules import SpecEntry


def lookup(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Return the embedding rows of `tokens_BT`, in the layout that activations have between blocks.

    `table_VD` is laid out as at rest.
    """
    spec = None if activations.activation_spec() is None else jax.typeof(table_VD).sharding.spec
    return _lookup(table_VD, tokens_BT.astype(jnp.int32), (table_VD.shape[0], table_VD.dtype, spec))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _lookup(table_VD: jax.Array, tokens_BT: jax.Array, at_rest: tuple[int, Any, P | None]) -> jax.Array:
    out = activations.activation_spec("batch", "block_seq", "act_embed")
    if out is None:
        return table_VD[tokens_BT]
    table_VD = activations.gather(table_VD, "vocab", "embed")
    axes, tokens_spec = activations.split_by("act_vocab"), P(*map(activations.split_by, ("batch", "seq")))
    if axes is None:
        whole = activations.activation_spec("batch", "seq", "act_embed")
        return activations.constrain(table_VD.at[tokens_BT].get(out_sharding=whole), "batch", "block_seq", "act_embed")
    # Sum and split in one collective, directly into the layout between blocks.
    scatter_sequence = axis_rules.axes_of(out[1]) == (*axis_rules.axes_of(tokens_spec[1]), *axis_rules.axes_of(axes))

    def local(table, tokens):
        rows, mine = _own_rows(tokens, axes, table.shape[0])
        x = jnp.where(mine[..., None], table[jnp.where(mine, rows, 0)], 0)
        return lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True) if scatter_sequence else lax.psum(x, axes)

    x = activations.manual_region(local, in_specs=(P(axes, None), tokens_spec),
                               out_specs=out if scatter_sequence else P(*tokens_spec, None))(table_VD, tokens_BT)
    return x if scatter_sequence else activations.constrain(x, "batch", "block_seq", "act_embed")


def _forward(table_VD, tokens_BT, at_rest) -> tuple[jax.Array, jax.Array]:
    return _lookup(table_VD, tokens_BT, at_rest), tokens_BT


def _backward(at_rest, tokens_BT, dx_BTD) -> tuple[jax.Array, None]:
    vocab, dtype, spec = at_rest
    if spec is None:
        return _summed_rows(dx_BTD, tokens_BT, vocab).astype(dtype), None
    batch, seq, axes = map(activations.split_by, ("batch", "seq", "act_vocab"))
    batch_axes, vocab_axes = axis_rules.axes_of(batch) + axis_rules.axes_of(seq), axis_rules.axes_of(axes)
    held = vocab // axis_rules.shards(axes, jax.sharding.get_abstract_mesh())
    # The devices that split the batch can scatter the sum among themselves if they split the table, too.
    column_axes = axis_rules.axes_of(spec[1]) if set(axis_rules.axes_of(spec[1])) <= set(batch_axes) else ()
    others = tuple(axis for axis in batch_axes if axis not in column_axes)

    def local(dx, tokens):
        rows, mine = _own_rows(tokens, vocab_axes, held)
        d = _summed_rows(dx, jnp.where(mine, rows, held), held).astype(dtype)
        if column_axes:
            d = lax.psum_scatter(d, column_axes, scatter_dimension=1, tiled=True)
        return lax.psum(d, others) if others else d

    dtable_VD = activations.manual_region(
        local, in_specs=(P(batch, seq, None), P(batch, seq)), out_specs=P(axes, column_axes or None),
    )(activations.constrain(dx_BTD, "batch", "seq", "act_embed"), activations.constrain(tokens_BT, "batch", "seq"))
    return jax.reshard(dtable_VD, spec), None


_lookup.defvjp(_forward, _backward)


def _own_rows(tokens: jax.Array, vocab_axes: SpecEntry, held: int) -> tuple[jax.Array, jax.Array]:
    """Return where tokens are among the rows that a device holds, and whether they are there at all."""
    # Where a device holds all rows, indexing counts negative ones from the end.
    rows = tokens - lax.axis_index(vocab_axes) * held if vocab_axes else jnp.where(tokens < 0, tokens + held, tokens)
    return rows, (rows >= 0) & (rows < held)


def _summed_rows(dx: jax.Array, rows: jax.Array, held: int) -> jax.Array:
    """Return for each row of a table the sum, in float32, of the gradients of where it was looked up."""
    # XLA would take these zeros for those that the loss head begins with, and keep them through the backward pass.
    zeros, dx = lax.optimization_barrier((jnp.zeros((held, dx.shape[-1]), jnp.float32), dx))
    return zeros.at[rows].add(dx.astype(jnp.float32), mode="drop")
