"""Multi-head latent attention (DeepSeek-AI, 2024; arXiv 2405.04434): keys and values of all heads from one latent.

Queries and keys have a part without positions, per head, and a rotary part, whose key is shared by all heads. Rotary
pairs are (i, i + R/2) as in all jaxtrain models; in the published weights the pairs are adjacent, so their columns are
in another order.

Shape suffixes: B batch, T sequence, D embedding, L latent width, H heads, K head width, R rotary width.
"""


import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.kernels.attention import HEADS, cached_attention
from jaxtrain.models.attention.kv_cache import CACHE, Aux, Cache, entry
from jaxtrain.models.attention.rotary import Rotary
from jaxtrain.models.attention.self_attention import attend
from jaxtrain.models.layers import RESIDUAL, Linear, RMSNorm
from jaxtrain.sharding import activations

LATENT = ("batch", "seq", None)


class LatentAttention(nnx.Module):
    """Causal self-attention through latents of width `q_rank` (0: none for queries) and `kv_rank`."""

    shared_by = ()  # the latents are replicated on all devices that split the heads
    unclippable = ""  # the norms are of latents, before the matrices of each head

    def __init__(self, dim: int, heads: int, head_dim: int, rope_dim: int, value_dim: int, q_rank: int, kv_rank: int,
                 eps: float, *, out_std: float, rngs: nnx.Rngs, window: int = 0, backend: str = "auto",
                 context: str = "auto", score_factor: float = 1.0, tempered: bool = False, gated: bool = False):
        """Make the projections.

        Args:
            tempered: beside the angles there is a factor of queries at their positions, see `Tempered`.
            gated: what each head found is multiplied by the sigmoid of a number.
        """
        self.head_dim, self.kv_rank, self.window = head_dim, kv_rank, window
        self.backend, self.context, self.score_factor = backend, context, score_factor
        self.tempered = tempered
        up, down = ("rank", "heads", "head_dim"), ("embed", "latent")
        self.q_down = Linear("btd,dl->btl", (dim, q_rank), down, LATENT, rngs=rngs) if q_rank else None
        self.q_norm = RMSNorm(q_rank, eps, axis="latent", rngs=rngs) if q_rank else None
        self.q = Linear("btd,dhk->bthk", (q_rank or dim, heads, head_dim + rope_dim), up, HEADS, rngs=rngs)
        self.kv_down = Linear("btd,dl->btl", (dim, kv_rank + rope_dim), down, LATENT, rngs=rngs)
        self.kv_norm = RMSNorm(kv_rank, eps, axis="latent", rngs=rngs)
        self.kv = Linear("btd,dhk->bthk", (kv_rank, heads, head_dim + value_dim), up, HEADS, rngs=rngs)
        self.gate = Linear("btd,dh->bth", (dim, heads), ("embed", "heads"), HEADS[:3], rngs=rngs) if gated else None
        self.out = Linear("bthk,hkd->btd", (heads, value_dim, dim), ("heads", "head_dim", "embed"), RESIDUAL,
                          std=out_std, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        q_BTL = x_BTD if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x_BTD))
        q_BTHK, q_BTHR = jnp.split(self.q(q_BTL), [self.head_dim], axis=-1)
        if self.tempered:
            angles, factor_BT11 = angles
            q_BTHK, q_BTHR = ((q * factor_BT11).astype(q.dtype) for q in (q_BTHK, q_BTHR))
        kv_BTL, k_BTR = jnp.split(self.kv_down(x_BTD), [self.kv_rank], axis=-1)
        kv_BTL = self.kv_norm(kv_BTL)
        if cache is not None and cache.entries is not None:
            return self.absorbed(x_BTD, q_BTHK, Rotary.rotate(q_BTHR, angles), kv_BTL, k_BTR, angles, cache)
        k_BTHK, v_BTHV = jnp.split(self.kv(kv_BTL), [self.head_dim], axis=-1)
        k_BT1R = Rotary.rotate(k_BTR[:, :, None], angles)
        q = jnp.concatenate([q_BTHK, Rotary.rotate(q_BTHR, angles)], axis=-1)
        if self.score_factor != 1:
            q = (q * self.score_factor).astype(q.dtype)
        k = jnp.concatenate([k_BTHK, k_BT1R + jnp.zeros_like(q_BTHR)], axis=-1)
        y_BTHV = attend(q, k, v_BTHV, segments_BT=segments_BT, window=self.window, backend=self.backend,
                        context=self.context)
        return self.returned(x_BTD, y_BTHV), {} if cache is None else {CACHE: _entry(kv_BTL, k_BT1R)}

    def returned(self, x_BTD: jax.Array, y_BTHV: jax.Array) -> jax.Array:
        """Return what attention adds to a layer, from what it found for its input."""
        if self.gate is not None:
            y_BTHV = y_BTHV * jax.nn.sigmoid(self.gate(x_BTD).astype(jnp.float32))[..., None].astype(y_BTHV.dtype)
        return self.out(y_BTHV)

    def absorbed(self, x_BTD: jax.Array, q_BTHK: jax.Array, q_BTHR: jax.Array, kv_BTL: jax.Array, k_BTR: jax.Array,
                 angles, cache: Cache) -> tuple[jax.Array, Aux]:
        """Return attention of one token per row over cached latents, which are keys and values of all heads.

        Queries are projected to the latents' space and sums of latents to values, so that no latent is projected up.
        """
        up_LHK, up_LHV = jnp.split(self.kv.matrix(q_BTHK.dtype), [self.head_dim], axis=-1)
        spec = activations.activation_spec(*HEADS)
        q_BTHL = jnp.einsum("bthk,lhk->bthl", q_BTHK, up_LHK, out_sharding=spec)
        q = jnp.concatenate([q_BTHL, q_BTHR], axis=-1)
        own = _entry(kv_BTL, Rotary.rotate(k_BTR[:, :, None], angles))
        entries, new = cache.read(own)
        before = entries["latents"]
        scale = self.score_factor * (self.head_dim + q_BTHR.shape[-1])**-0.5
        sums_BTHL = cached_attention.attend(  # of rotary keys as well: a part of the latents would be copied
            q, own["latents"], own["latents"], before, before, cache.visible(before.shape[-2], self.window),
            scale)[..., :self.kv_rank]
        y_BTHV = jnp.einsum("bthl,lhv->bthv", sums_BTHL, up_LHV, out_sharding=spec)
        return self.returned(x_BTD, y_BTHV), {CACHE: new}


def _entry(kv_BTL: jax.Array, k_BT1R: jax.Array) -> dict[str, jax.Array]:
    """Return what the cache keeps of a token: the normalised latent, and the rotary key that all heads share."""
    return {"latents": entry(jnp.concatenate([kv_BTL[:, :, None], k_BT1R], axis=-1))}
