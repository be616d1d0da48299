"""Embedding lookup in a table whose vocabulary is split over mesh axes: each device looks up the rows it holds."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.sharding import rules as sharding


def lookup(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Return the embedding rows of `tokens_BT`, in the layout that activations have between blocks."""
    out = sharding.activation_spec("batch", "block_seq", "act_embed")
    if out is None:
        return table_VD[tokens_BT]
    axes, tokens_spec = sharding.split_by("act_vocab"), P(*map(sharding.split_by, ("batch", "seq")))
    if axes is None:
        whole = sharding.activation_spec("batch", "seq", "act_embed")
        return sharding.constrain(table_VD.at[tokens_BT].get(out_sharding=whole), "batch", "block_seq", "act_embed")
    # Sum and split in one collective, directly into the layout between blocks.
    scatter_sequence = sharding.axes_of(out[1]) == (*sharding.axes_of(tokens_spec[1]), *sharding.axes_of(axes))

    def local(table, tokens):
        rows = tokens - lax.axis_index(axes) * table.shape[0]
        mine = (rows >= 0) & (rows < table.shape[0])
        x = jnp.where(mine[..., None], table[jnp.where(mine, rows, 0)], 0)
        return lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True) if scatter_sequence else lax.psum(x, axes)

    x = sharding.manual_region(local, in_specs=(P(axes, None), tokens_spec),
                        out_specs=out if scatter_sequence else P(*tokens_spec, None))(table_VD, tokens_BT)
    return x if scatter_sequence else sharding.constrain(x, "batch", "block_seq", "act_embed")
