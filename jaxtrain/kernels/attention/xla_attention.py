"""Attention in plain operations, for any platform: all scores [B, H, T, T] at once, in float32.

Shape suffixes: B batch, T and S sequence, H query heads, G key/value heads, R query heads per group (H = G R), K head
width.
"""

import jax
import jax.numpy as jnp

from jaxtrain.kernels.attention import sinks
from jaxtrain.kernels.functions import soft_capped, softmax

BOTH_WAYS = -1  # in place of a window: attention that is not causal


def visible(q_len: int, k_len: int, segments_BT: jax.Array | None, window: int,
            key_segments_BS: jax.Array | None = None, first: int = 0) -> jax.Array | None:
    """Return which keys each query may attend to, as a mask [1 or B, T, S]; None: all.

    `first`: the place of the first query among the keys.
    """
    keys_BS = segments_BT if key_segments_BS is None else key_segments_BS
    if keys_BS is not None:
        keys_BS = keys_BS[:, None, :] if segments_BT is None else segments_BT[:, :, None] == keys_BS[:, None, :]
    if window == BOTH_WAYS:
        return keys_BS
    behind = jnp.arange(first, first + q_len)[:, None] - jnp.arange(k_len)[None, :]
    mask = (behind >= 0)[None]
    if window:
        mask &= (behind < window)[None]
    return mask if keys_BS is None else mask & keys_BS


def attention(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BT: jax.Array | None, window: int,
              soft_cap: float, sinks_H: jax.Array | None = None, key_segments_BS: jax.Array | None = None,
              first: int = 0) -> jax.Array:
    """Return attention; the compiler places it on a mesh. `first`: the place of the first query among the keys."""
    B, T, H, K = q_BTHK.shape
    S, G = k_BSGK.shape[1:3]
    R = H // G
    # Heads before sequence, so that the matmuls need no transposes inside. The R query heads that share a key head are
    # concatenated into one long sequence, which keeps the arrays four-dimensional (faster in XLA on CPU).
    q_BGNK = (q_BTHK * K**-0.5).reshape(B, T, G, R, K).transpose(0, 2, 3, 1, 4).reshape(B, G, R * T, K)
    k_BGSK, v_BGSK = k_BSGK.transpose(0, 2, 1, 3), v_BSGK.transpose(0, 2, 1, 3)
    scores = jnp.einsum("bgnk,bgsk->bgns", q_BGNK, k_BGSK, preferred_element_type=jnp.float32)
    scores = soft_capped(scores, soft_cap)
    # A large finite number masks as well as -inf where a query sees a key, and gives no NaN where it sees none.
    if (mask_BTS := visible(T, S, segments_BT, window, key_segments_BS, first)) is not None:
        mask_BTS = jnp.where(mask_BTS, 0.0, -1e30)
        scores += (jnp.tile(mask_BTS, (1, R, 1)) if R > 1 and mask_BTS.shape[1] > 1 else mask_BTS)[:, None]
    weights = softmax(scores) if sinks_H is None else sinks.softmax(scores, sinks.by_query(sinks_H, G, T))
    weights = weights.astype(v_BSGK.dtype)
    out_BGNK = jnp.einsum("bgns,bgsk->bgnk", weights, v_BGSK)
    return out_BGNK.reshape(B, G, R, T, -1).transpose(0, 3, 1, 2, 4).reshape(B, T, H, -1)
