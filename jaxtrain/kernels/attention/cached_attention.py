"""Attention of one new token per row over the keys and values of a cache, and over its own.

The cache is read in place: scores of the cache and of the token itself are computed apart and normalised together.

Shape suffixes: B batch, H query heads, G key/value heads, R query heads per group (H = G R), S slots, K head width.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxtrain.kernels.functions import soft_capped, softmax
from jaxtrain.sharding import activations

HEADS = ("batch", None, "act_heads", "act_head_dim")
ENTRY = ("batch", "act_kv_heads", None, "act_head_dim")
SHARED = ("batch", None, None, "act_head_dim")  # an entry of which all heads read the same


def attend(q_B1HK: jax.Array, k_BG1K: jax.Array, v_BG1K: jax.Array, k_BGSK: jax.Array, v_BGSK: jax.Array,
           visible_BS: jax.Array, scale: float, sinks_H: jax.Array | None = None, soft_cap: float = 0.0) -> jax.Array:
    """Return attention [B, 1, H, K] of a token over the visible slots and itself.

    Scores are multiplied by `scale`, and then capped.
    """
    names = SHARED if k_BGSK.shape[1] == 1 else ENTRY
    if names == ENTRY and activations.split_by("act_heads") != activations.split_by("act_kv_heads"):
        repeats, names = q_B1HK.shape[2] // k_BGSK.shape[1], ("batch", "act_heads", None, "act_head_dim")
        k_BG1K, v_BG1K, k_BGSK, v_BGSK = (activations.constrain(jnp.repeat(x, repeats, axis=1), *names)
                                          for x in (k_BG1K, v_BG1K, k_BGSK, v_BGSK))
    heads, entry = activations.activation_spec(*HEADS), activations.activation_spec(*names)
    if heads is None:
        return _attend(q_B1HK, k_BG1K, v_BG1K, k_BGSK, v_BGSK, visible_BS, sinks_H, scale=scale,
                       soft_cap=soft_cap)
    return activations.manual_region(
        partial(_attend, scale=scale, soft_cap=soft_cap),
        in_specs=(heads, *[entry] * 4, activations.activation_spec("batch", None), jax.P(heads[2])), out_specs=heads,
    )(q_B1HK, k_BG1K, v_BG1K, k_BGSK, v_BGSK, activations.constrain(visible_BS, "batch", None), sinks_H)


def _attend(q_B1HK, k_BG1K, v_BG1K, k_BGSK, v_BGSK, visible_BS, sinks_H, *, scale, soft_cap):
    B, _, H, K = q_B1HK.shape
    G, S = k_BGSK.shape[1:3]
    q_BGRK = (q_B1HK * scale).astype(q_B1HK.dtype).reshape(B, G, H // G, K)
    before, own = (soft_capped(jnp.einsum("bgrk,bgsk->bgrs", q_BGRK, k, preferred_element_type=jnp.float32), soft_cap)
                   for k in (k_BGSK, k_BG1K))
    before += jnp.where(visible_BS, 0.0, -1e30)[:, None, None]
    sink = [] if sinks_H is None else [jnp.broadcast_to(sinks_H.reshape(1, G, H // G, 1), own.shape)]
    weights = softmax(jnp.concatenate([before, own, *sink], -1)).astype(v_BGSK.dtype)
    out_BGRK = jnp.einsum("bgrs,bgsk->bgrk", weights[..., :S], v_BGSK) + weights[..., S:S + 1] * v_BG1K
    return out_BGRK.reshape(B, 1, H, -1).astype(q_B1HK.dtype)
