"""Kimi delta attention (Kimi Team, 2025; arXiv 2510.26692): the gated delta rule with a decay of every key channel.

    S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_(t-1) + beta_t k_t v_t^T,    y_t = q_t^T S_t

Within a chunk, decays cannot be taken out of the products of queries and keys, and dividing by the decay since the
chunk began overflows where decays are strong. chunks.py has the products without division.

Shape suffixes: B batch, T sequence, H heads, G groups of heads, K key width, V value width.
"""

import jax
import jax.numpy as jnp

from jaxtrain.models.recurrent import chunks
from jaxtrain.models.recurrent.gated_delta import delta_rule, delta_step


def kimi_delta_attention(q_BTGK: jax.Array, k_BTGK: jax.Array, v_BTHV: jax.Array, g_BTHK: jax.Array,
                         beta_BTH: jax.Array, segments_BT: jax.Array | None = None,
                         state_BHKV: jax.Array | None = None, *,
                         kernel: str = "auto") -> tuple[jax.Array, jax.Array]:
    """Return y [B, T, H, V] in the dtype of v, and the last state [B, H, K, V]: as `gated_delta_rule`, but for g."""
    return delta_rule(_products, q_BTGK, k_BTGK, v_BTHV, g_BTHK, beta_BTH, segments_BT, state_BHKV, kernel)


def _products(q, k, g):
    qk, kk = (chunks.products_by_halves(x, k, g) for x in (q, k))
    return qk + (q * k).sum(-1)[..., None] * jnp.eye(k.shape[-2]), kk


def kimi_delta_step(q_B1GK: jax.Array, k_B1GK: jax.Array, v_B1HV: jax.Array, g_B1HK: jax.Array, beta_B1H: jax.Array,
                    state_BHKV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `kimi_delta_attention` of one token a row, and the state after it."""
    return delta_step(q_B1GK, k_B1GK, v_B1HV, g_B1HK, beta_B1H, state_BHKV)
