"""Attention in which every token sees all tokens of its segment, in plain operations.

Keys and values are gathered over the devices that share a row; each device computes its own queries and heads.

Shape suffixes: B batch, T and S sequence, H heads, K head width.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.kernels.functions import softmax
from jaxtrain.sharding import rules as sharding


@jax.named_scope("attention")
def attend_all(q_BTHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """Return attention over all keys of the same segment, before and after the query."""
    k_BSHK, v_BSHK = (sharding.constrain(x, "batch", None, "act_heads", "act_head_dim") for x in (k_BSHK, v_BSHK))
    segments_BS = sharding.constrain(segments_BT, "batch", None)
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK * q_BTHK.shape[-1] ** -0.5, k_BSHK,
                             preferred_element_type=jnp.float32)
    # Every query sees at least itself, so a large finite number masks as well as -inf and has zero gradient.
    mask_BTS = jnp.where(segments_BT[:, :, None] == segments_BS[:, None, :], 0.0, -1e30)
    weights_BHTS = softmax(scores_BHTS + mask_BTS[:, None]).astype(v_BSHK.dtype)
    out_BTHK = jnp.einsum("bhts,bshk->bthk", weights_BHTS, v_BSHK)
    return checkpoint_name(out_BTHK, "attention")
