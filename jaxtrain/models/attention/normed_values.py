"""Attention whose values are normalised too, and may be the keys; layers after one may read what it attended to.

Shape suffixes: B batch, T sequence, D embedding, H query heads, G key/value heads, K head width.
"""

import math
from functools import partial

import jax
from flax import nnx

from jaxtrain.base.annotations import PyTree
from jaxtrain.kernels.attention import HEADS, KV_HEADS
from jaxtrain.models.attention.kv_cache import Aux, Cache, attend_cached, kept
from jaxtrain.models.attention.rotary import Rotary
from jaxtrain.models.attention.self_attention import attend
from jaxtrain.models.layer_groups import PASSED_ON
from jaxtrain.models.layers import RESIDUAL, Linear, RMSNorm


class KindsOfRotary:
    """The rotary positions of layers of several kinds, by the letter of each."""

    def __init__(self, by_kind: dict[str, Rotary]):
        self.by_kind = tuple(by_kind.items())  # part of the program, not of the state

    def angles(self, positions_BT: jax.Array) -> dict[str, PyTree]:
        """Return the angles of each kind."""
        return {kind: rotary.angles(positions_BT) for kind, rotary in self.by_kind}


class NormedValueAttention(nnx.Module):
    """Grouped-query self-attention with norms of queries, keys and values, whose scores have no divisor."""

    shared_by = ("act_heads", "act_kv_heads")  # output dimensions of its first matmuls
    unclippable = "queries and keys are normalised"

    def __init__(self, kind: str, dim: int, heads: int, kv_heads: int, head_dim: int, eps: float, *, out_std: float,
                 rngs: nnx.Rngs, window: int = 0, bias: bool = False, keys_are_values: bool = False,
                 reads: bool = False, passes_on: bool = False, backend: str = "auto", context: str = "auto"):
        """Make the projections and norms.

        Args:
            kind: the letter by which it finds its angles.
            keys_are_values: values are the projected keys.
            reads: keys and values are those that the last layer of this kind before it passed on.
            passes_on: it does that.
        """
        self.kind, self.window, self.passes_on, self.backend, self.context = kind, window, passes_on, backend, context
        kv = (dim, kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), KV_HEADS
        self.q = Linear("btd,dhk->bthk", (dim, heads, head_dim), ("embed", "heads", "head_dim"), HEADS, bias=bias,
                        rngs=rngs)
        self.k = None if reads else Linear("btd,dgk->btgk", *kv, bias=bias, rngs=rngs)
        self.v = None if reads or keys_are_values else Linear("btd,dgk->btgk", *kv, bias=bias, rngs=rngs)
        self.out = Linear("bthk,hkd->btd", (heads, head_dim, dim), ("heads", "head_dim", "embed"), RESIDUAL, bias=bias,
                          std=out_std, rngs=rngs)
        norm = partial(RMSNorm, head_dim, eps, axis="head_dim", rngs=rngs)
        self.q_norm, self.k_norm = norm(), None if reads else norm()
        self.v_norm = norm(scale=False)

    def keys(self, x_BTD: jax.Array, angles: PyTree) -> tuple[jax.Array, jax.Array]:
        """Return the layer's own keys, rotated by their positions, and values."""
        assert self.k is not None and self.k_norm is not None
        k = self.k(x_BTD)
        v = k if self.v is None else self.v(x_BTD)
        return Rotary.rotate(self.k_norm(k), angles), self.v_norm(v)

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: dict[str, PyTree],
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        q = self.q_norm(self.q(x_BTD))
        q = Rotary.rotate((q * math.sqrt(q.shape[-1])).astype(q.dtype), angles[self.kind])  # what `attend` divides by
        at, own = f"attended {self.kind}", self.k is not None
        k, v, cache = (*self.keys(x_BTD, angles[self.kind]), cache) if own else angles[at]
        aux = {PASSED_ON: {at: (k, v, cache)}} if self.passes_on else {}
        if cache is not None and cache.entries is not None:
            y_BTD, entries = attend_cached(self.out, q, k, v, cache, self.window)
            return y_BTD, aux | (entries if own else {})
        y_BTHK = attend(q, k, v, segments_BT=segments_BT, window=self.window, backend=self.backend,
                        context=self.context)
        return self.out(y_BTHK), aux | (kept(cache, k, v) if own else {})
