"""Attention with a sliding window in all layers of a stack but the first ones, as in Qwen2 and Qwen3."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.base.annotations import AnyArray
from jaxtrain.models.attention.by_layer.attention_by_layer import attend_by_layer
from jaxtrain.models.attention.kv_cache import Aux, Cache, attend_cached, kept
from jaxtrain.models.attention.rotary import Angles, Rotary
from jaxtrain.models.attention.self_attention import Attention


class LateWindowAttention(Attention):
    """Grouped-query self-attention; the number of the layer says whether it has a window."""

    numbered = True

    def __init__(self, first: int, *args: Any, **how: Any):
        """`first`: so many layers have none."""
        super().__init__(*args, **how)
        self.first = first

    def everywhere(self, layer: AnyArray) -> AnyArray:
        """Return whether the layer with this number has no window."""
        return layer < self.first

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: Angles, layer: AnyArray,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        """Apply attention; `layer` is its number."""
        q, k, v = self.project(x_BTD)
        q, k = Rotary.rotate(q, angles), Rotary.rotate(k, angles)
        everywhere = self.everywhere(layer)
        if cache is not None and cache.entries is not None:
            return attend_cached(partial(self.returned, x_BTD), q, k, v, cache, jnp.where(everywhere, 0, self.window))
        out = attend_by_layer(everywhere, q, k, v, segments_BT=segments_BT, window=self.window, backend=self.backend,
                              context=self.context)
        return self.returned(x_BTD, out), kept(cache, k, v)
