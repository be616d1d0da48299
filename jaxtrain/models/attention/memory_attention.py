"""Attention that is not causal: of an encoder to all of its positions, and of a decoder to what an encoder returned.

Shape suffixes: B batch, T and S sequence, D embedding, H heads, K head width.
"""


import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.base.annotations import PyTree
from jaxtrain.kernels import attention
from jaxtrain.kernels.attention import HEADS
from jaxtrain.kernels.functions import softmax
from jaxtrain.models.attention.kv_cache import CACHE, Aux, Cache, kept
from jaxtrain.models.attention.self_attention import Attention
from jaxtrain.parallel.cut_rows import whole_rows
from jaxtrain.sharding import activations


@jax.named_scope("attention")
def attend_to(q_BTHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, visible: jax.Array | None = None,
              backend: str = "auto") -> jax.Array:
    """Return attention to all keys, or to those that `visible` shows, to all queries [B, S] or to each [1 or B, T, S].

    Each query must see a key. What each query sees for itself, plain operations compute on every platform.
    """
    k_BSHK, v_BSHK = (whole_rows(x, *HEADS[2:]) for x in (k_BSHK, v_BSHK))
    if visible is None or visible.ndim == 2:
        return attention.attend(q_BTHK, k_BSHK, v_BSHK, key_segments_BS=visible, causal=False, backend=backend)
    return _attend(q_BTHK, k_BSHK, v_BSHK, visible, "bshk")


@jax.named_scope("attention")
def _attend(q_BTHK: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array | None, order: str) -> jax.Array:
    """Return attention to keys and values whose dimensions are in this order."""
    scores = jnp.einsum(f"bthk,{order}->bhts", q_BTHK * q_BTHK.shape[-1]**-0.5, k, preferred_element_type=jnp.float32)
    if visible is not None:
        scores += jnp.where(visible[:, None] if visible.ndim == 2 else visible, 0.0, -1e30)[:, None]
    weights = softmax(scores).astype(v.dtype)
    out = jnp.einsum(f"bhts,{order}->bthk", weights, v, out_sharding=activations.activation_spec(*HEADS))
    return checkpoint_name(out, "attention")


class MemoryAttention(Attention):
    """Attention of one sequence to another, which may be the same."""

    unclippable = "it is not causal"

    def __call__(self, x_BTD: jax.Array, memory_BSD: jax.Array | None,  # pyrefly: ignore[bad-override]
                 visible: jax.Array | None = None, cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        """Return what `x_BTD` gets from the memory; with a cache that has entries, from those instead."""
        q_BTHK = self.q(x_BTD)
        if cache is not None and cache.entries is not None:
            return self.out(_attend(q_BTHK, cache.entries["keys"], cache.entries["values"], visible, "bhsk")), {
                CACHE: {}}
        assert memory_BSD is not None
        k, v = self.k(memory_BSD), self.v(memory_BSD)
        return self.out(attend_to(q_BTHK, k, v, visible, self.backend)), kept(cache, k, v)

    def carry_on(self, x_BTD: jax.Array, past: PyTree, visible_BTS: jax.Array) -> tuple[jax.Array, PyTree]:
        """Return attention to the keys and values of the past and then to its own, and the new past, as long as before.
        """
        q, k, v = self.project(x_BTD)
        keys, values = (jnp.concatenate([before, new], 1) for before, new in ((past["keys"], k), (past["values"], v)))
        held = past["keys"].shape[1]
        return self.out(attend_to(q, keys, values, visible_BTS)), {
            "keys": keys[:, keys.shape[1] - held:], "values": values[:, values.shape[1] - held:]}
