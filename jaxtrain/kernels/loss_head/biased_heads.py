"""Output heads with a bias of each token: rows below the head's matrix, of which activations read the first by a 1.

So what computes logits, or losses without them, needs no bias. There are 128 rows, since matmuls of a width that is odd
are slow; the others are 0.

Shape suffixes: D embedding, V vocabulary, E embedding and those rows.
"""

import jax
import jax.numpy as jnp

from jaxtrain.sharding import activations

ROWS = 128


def with_bias_rows(head_DV: jax.Array, bias_V: jax.Array) -> jax.Array:
    """Return an output head with the rows of its bias; both are laid out as at rest, and the result as in use."""
    head_DV, bias_V = activations.gather(head_DV, "embed", "vocab"), activations.gather(bias_V, "vocab")
    return jnp.pad(jnp.concatenate([head_DV, bias_V[None]]), [(0, ROWS - 1), (0, 0)])


def for_head(x: jax.Array, head: jax.Array) -> jax.Array:
    """Return activations [..., D] as a head reads them: [..., E], if it has the rows of a bias."""
    width = x.shape[-1]
    if head.shape[0] == width:
        return x
    first = jnp.arange(head.shape[0]) == width
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, ROWS)]) + first.astype(x.dtype)
