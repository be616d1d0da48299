"""gpt-oss: attention sinks, local and global attention by turns, experts with biases everywhere (arXiv 2508.10925).

All layers have parameters of the same shapes, so they are one stack: a layer learns from its number whether it has a
sliding window.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.families import GptOssConfig
from jaxtrain.models.attention.attention_by_layer import attend_by_layer
from jaxtrain.models.attention.kv_cache import Cache, attend_cached, kept
from jaxtrain.models.attention.rotary import Rotary, scaled_frequencies
from jaxtrain.models.attention.self_attention import Attention
from jaxtrain.models.decoder import Compute, Decoder
from jaxtrain.models.experts.moe import MoE
from jaxtrain.models.layer_groups import NumberedBlock
from jaxtrain.models.layers import Embed, Head, RMSNorm, param
from jaxtrain.sharding import rules as sharding


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float, alpha: float) -> jax.Array:
    """Return gate sigmoid(alpha gate) (up + 1), with up clamped to the limit and the gate so from above."""
    g, u = jnp.minimum(gate.astype(jnp.float32), limit), jnp.clip(up.astype(jnp.float32), -limit, limit)
    return (g * jax.nn.sigmoid(alpha * g) * (u + 1)).astype(up.dtype)


class SinkAttention(Attention):
    """Grouped-query self-attention with a sink for each head; the number of the layer says whether it has a window."""

    def __init__(self, c: GptOssConfig, compute: Compute, out_std: float, rngs: nnx.Rngs):
        super().__init__(c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim, out_std=out_std, qkv_bias=True,
                         out_bias=True, window=c.window, backend=compute.attention, context=compute.context, rngs=rngs)
        self.global_every = c.global_every
        self.sinks = param(rngs, (c.num_heads,), ("heads",), compute_dtype="float32")

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: tuple[jax.Array, ...],
                 cache: Cache | None = None) -> tuple[jax.Array, dict[str, Any]]:
        """Apply attention; `angles` are cosine, sine, and the number of the layer."""
        q, k, v = self.project(x_BTD)
        cos, sin, layer = angles
        q, k = Rotary.rotate(q, (cos, sin)), Rotary.rotate(k, (cos, sin))
        everywhere, sinks_H = (layer + 1) % self.global_every == 0, sharding.gather(self.sinks[...], "heads")
        if cache is not None and cache.entries is not None:
            return attend_cached(self.out, q, k, v, cache, jnp.where(everywhere, 0, self.window), sinks_H)
        out = attend_by_layer(everywhere, q, k, v, segments_BT=segments_BT, window=self.window, sinks_H=sinks_H,
                              backend=self.backend, context=self.context)
        return self.out(out), kept(cache, k, v)


def gpt_oss(c: GptOssConfig, compute: Compute, *, rngs: nnx.Rngs) -> Decoder:
    """Return a decoder in the style of gpt-oss."""
    out_std = 0.02 / (2 * c.num_layers) ** 0.5
    activation = partial(clamped_swiglu, limit=c.swiglu_limit, alpha=c.swiglu_alpha)

    def norm(rngs: nnx.Rngs) -> RMSNorm:
        return RMSNorm(c.embed_dim, c.norm_eps, rngs=rngs)

    def block(rngs: nnx.Rngs) -> NumberedBlock:
        return NumberedBlock(norm(rngs), SinkAttention(c, compute, out_std, rngs), norm(rngs),
                             MoE(c, out_std=out_std, options=compute.experts, biased=True, activation=activation,
                                 rngs=rngs))

    return Decoder(
        Embed(c.vocab_size, c.embed_dim, rngs=rngs), block, c.num_layers, norm(rngs),
        rotary=Rotary(*scaled_frequencies(c, c.head_dim)),
        head=None if c.tied_embeddings else Head(c.vocab_size, c.embed_dim, rngs=rngs), numbered=True,
        compute=compute, rngs=rngs)
