"""Attention with a sink for each head, local and global by turns, as in gpt-oss."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.base.annotations import AnyArray
from jaxtrain.models.attention.by_layer.attention_by_layer import attend_by_layer
from jaxtrain.models.attention.kv_cache import Aux, Cache, attend_cached, kept
from jaxtrain.models.attention.rotary import Angles, Rotary
from jaxtrain.models.attention.self_attention import Attention
from jaxtrain.models.layers import param
from jaxtrain.sharding import activations


class SinkAttention(Attention):
    """Grouped-query self-attention with a sink for each head; the number of the layer says whether it has a window."""

    numbered = True

    def __init__(self, global_every: int, dim: int, heads: int, *sizes: int, rngs: nnx.Rngs, **how: Any):
        """Attend to everything in every `global_every`-th layer."""
        super().__init__(dim, heads, *sizes, rngs=rngs, **how)
        self.global_every = global_every
        self.sinks = param(rngs, (heads,), ("heads",), compute_dtype="float32")

    def everywhere(self, layer: AnyArray) -> AnyArray:
        """Return whether the layer with this number has no window."""
        return (layer + 1) % self.global_every == 0

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: Angles, layer: AnyArray,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        """Apply attention; `layer` is its number."""
        q, k, v = self.project(x_BTD)
        q, k = Rotary.rotate(q, angles), Rotary.rotate(k, angles)
        everywhere, sinks_H = self.everywhere(layer), activations.gather(self.sinks[...], "heads")
        if cache is not None and cache.entries is not None:
            window = jnp.where(everywhere, 0, self.window)
            return attend_cached(partial(self.returned, x_BTD), q, k, v, cache, window, sinks_H)
        out = attend_by_layer(everywhere, q, k, v, segments_BT=segments_BT, window=self.window, sinks_H=sinks_H,
                              backend=self.backend, context=self.context)
        return self.returned(x_BTD, out), kept(cache, k, v)
