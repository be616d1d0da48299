"""Attention with a sink for each head, local and global by turns, as in gpt-oss."""


import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.decoder_config import DecoderConfig
from jaxtrain.models.attention.attention_by_layer import attend_by_layer
from jaxtrain.models.attention.kv_cache import Aux, Cache, attend_cached, kept
from jaxtrain.models.attention.rotary import Rotary
from jaxtrain.models.attention.self_attention import Attention
from jaxtrain.models.decoder import Compute
from jaxtrain.models.layers import param
from jaxtrain.sharding import activations


class SinkAttention(Attention):
    """Grouped-query self-attention with a sink for each head; the number of the layer says whether it has a window."""

    def __init__(self, c: DecoderConfig, compute: Compute, out_std: float, global_every: int, *, rngs: nnx.Rngs):
        """Attend to everything in every `global_every`-th layer."""
        super().__init__(c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim, out_std=out_std, qkv_bias=True,
                         out_bias=True, window=c.window, backend=compute.attention, context=compute.context, rngs=rngs)
        self.global_every = global_every
        self.sinks = param(rngs, (c.num_heads,), ("heads",), compute_dtype="float32")

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: tuple[jax.Array, ...],
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        """Apply attention; `angles` are cosine, sine, and the number of the layer."""
        q, k, v = self.project(x_BTD)
        cos, sin, layer = angles
        q, k = Rotary.rotate(q, (cos, sin)), Rotary.rotate(k, (cos, sin))
        everywhere, sinks_H = (layer + 1) % self.global_every == 0, activations.gather(self.sinks[...], "heads")
        if cache is not None and cache.entries is not None:
            return attend_cached(self.out, q, k, v, cache, jnp.where(everywhere, 0, self.window), sinks_H)
        out = attend_by_layer(everywhere, q, k, v, segments_BT=segments_BT, window=self.window, sinks_H=sinks_H,
                              backend=self.backend, context=self.context)
        return self.out(out), kept(cache, k, v)
