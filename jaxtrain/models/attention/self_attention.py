"""Self-attention of a model: its projections, and the kernel or the context parallelism that computes it.

Shape suffixes: B batch, T and S sequence, D embedding, H query heads, G key/value heads, K head width.
"""

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.base.annotations import PyTree
from jaxtrain.kernels import attention
from jaxtrain.kernels.attention import HEADS, KV_HEADS
from jaxtrain.models.attention import head_logits
from jaxtrain.models.attention.kv_cache import Aux, Cache, attend_cached, kept
from jaxtrain.models.attention.rotary import Rotary
from jaxtrain.models.layers import RESIDUAL, Linear
from jaxtrain.parallel import cut_rows


@jax.named_scope("attention")  # jaxtrain.bench attributes step time to these scope names
def attend(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, *, segments_BT: jax.Array | None = None,
           window: int = 0, sinks_H: jax.Array | None = None, soft_cap: float = 0.0, causal: bool = True,
           backend: str = "auto", context: str = "auto") -> jax.Array:
    """Return attention over keys of the same segment: causal, of the last `window` tokens if given, or both ways.

    Segments that are booleans only say which tokens are not padding: each row is one text then. Where a mesh shards the
    sequence over `context`, the tokens are in balanced order (parallel/context.py); for attention both ways, each
    device has all keys.
    """
    if causal:
        head_logits.measure(q_BTHK, k_BSGK, segments_BT, window)
    key_segments_BS = None
    if segments_BT is not None and segments_BT.dtype == bool and (causal or cut_rows.size() > 1):
        # Padding comes last; in balanced order it does not, and is a segment like others.
        segments_BT = None if causal else segments_BT.astype("int32")
    if cut_rows.size() > 1 and not causal:
        k_BSGK, v_BSGK = (cut_rows.whole_rows(x, *KV_HEADS[2:]) for x in (k_BSGK, v_BSGK))
        key_segments_BS = None if segments_BT is None else cut_rows.whole_rows(segments_BT)
    elif cut_rows.size() > 1:
        from jaxtrain.parallel.context import attend as attend_across

        return attend_across(q_BTHK, k_BSGK, v_BSGK, segments_BT, window=window, strategy=context, backend=backend,
                             sinks_H=sinks_H, soft_cap=soft_cap)
    return attention.attend(q_BTHK, k_BSGK, v_BSGK, segments_BT=segments_BT, key_segments_BS=key_segments_BS,
                            window=window, sinks_H=sinks_H, soft_cap=soft_cap, causal=causal, backend=backend)


class Attention(nnx.Module):
    """Multi-head or grouped-query self-attention, with optional biases, qk-norm and rotary positions."""

    shared_by = ("act_heads", "act_kv_heads")  # output dimensions of its first matmuls
    score_factor = 1.0

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, *, out_std: float, rngs: nnx.Rngs,
                 qkv_bias: bool = False, k_bias: bool = True, out_bias: bool = False,
                 qk_norm: Callable[[], nnx.Module] | None = None, k_norm: Callable[[], nnx.Module] | None = None,
                 window: int = 0, causal: bool = True, score_factor: float = 1.0, gated: bool = False,
                 backend: str = "auto", context: str = "auto"):
        """Make the projections, and the norms where there are any.

        Args:
            qk_norm: makes the norm of queries, and that of keys.
            k_norm: makes that of keys where it differs from that of queries.
            score_factor: of scores, beside 1 / sqrt(head_dim); `make_model` multiplies it by that of muP.
            gated: what attention found is multiplied by the sigmoid of a projection, entry by entry.
        """
        self.score_factor = score_factor
        self.window, self.causal, self.backend, self.context = window, causal, backend, context
        kv = (dim, kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), KV_HEADS
        q = (dim, heads, head_dim), ("embed", "heads", "head_dim"), HEADS
        self.q = Linear("btd,dhk->bthk", *q, bias=qkv_bias, rngs=rngs)
        self.k = Linear("btd,dgk->btgk", *kv, bias=qkv_bias and k_bias, rngs=rngs)
        self.v = Linear("btd,dgk->btgk", *kv, bias=qkv_bias, rngs=rngs)
        self.gate = Linear("btd,dhk->bthk", *q, bias=qkv_bias, rngs=rngs) if gated else None
        self.out = Linear("bthk,hkd->btd", (heads, head_dim, dim), ("heads", "head_dim", "embed"), RESIDUAL,
                          bias=out_bias, std=out_std, rngs=rngs)

        # Assigned once: NNX decides at the first assignment whether an attribute holds parameters.
        self.q_norm, self.k_norm = (qk_norm(), (k_norm or qk_norm)()) if qk_norm else (None, None)

    def project(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries and keys, normalised if the model does that, and values."""
        q, k, v = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
        return *self.normalised(q, k), v

    def normalised(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return queries and keys, normalised if the model does that; queries times the factor of scores."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q if self.score_factor == 1 else (q * self.score_factor).astype(q.dtype), k

    def turn(self, q: jax.Array, k: jax.Array, angles: PyTree) -> tuple[jax.Array, jax.Array]:
        """Return queries and keys, rotated by their positions."""
        q, k = Rotary.rotate(q, angles), Rotary.rotate(k, angles)
        if self.q_norm is None:  # kept in place of the products, which gradients do not need
            q, k = checkpoint_name(q, "dots"), checkpoint_name(k, "dots")
        return q, k

    @property
    def unclippable(self) -> str:
        """Return why its logits do not shrink with the weights of queries and keys; "" if they do."""
        return "" if self.q_norm is None and self.causal else (
            "queries and keys are normalised" if self.causal else "it is not causal")

    def returned(self, x_BTD: jax.Array, y_BTHK: jax.Array) -> jax.Array:
        """Return what attention adds to a layer, from what it found for its input."""
        if self.gate is not None:
            y_BTHK = y_BTHK * jax.nn.sigmoid(self.gate(x_BTD)).astype(y_BTHK.dtype)
        return self.out(y_BTHK)

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles=None,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        q, k, v = self.project(x_BTD)
        if angles is not None:
            q, k = self.turn(q, k, angles)
        if cache is not None and cache.entries is not None:
            return attend_cached(partial(self.returned, x_BTD), q, k, v, cache, self.window)
        y_BTHK = attend(q, k, v, segments_BT=segments_BT, window=self.window, causal=self.causal,
                        backend=self.backend, context=self.context)
        return self.returned(x_BTD, y_BTHK), kept(cache, k, v)
