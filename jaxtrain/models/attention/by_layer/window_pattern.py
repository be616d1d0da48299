"""Attention of layers in one stack, of which a list says which ones have a window."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.base.annotations import AnyArray
from jaxtrain.models.attention.by_layer.attention_by_layer import attend_by_layer
from jaxtrain.models.attention.kv_cache import Aux, Cache, attend_cached, kept
from jaxtrain.models.attention.rotary import Angles
from jaxtrain.models.attention.self_attention import Attention


class WindowPatternAttention(Attention):
    """Grouped-query self-attention; the number of the layer says whether it has a window."""

    numbered = True

    def __init__(self, pattern: str, *args: Any, **how: Any):
        """`pattern`: "G" for each layer without a window, "L" for one with it; it begins anew where it ends."""
        super().__init__(*args, **how)
        self.pattern = pattern

    def everywhere(self, layer: AnyArray) -> AnyArray:
        """Return whether the layer with this number has no window."""
        flags = np.array([kind == "G" for kind in self.pattern])
        return bool(flags[layer % len(flags)]) if isinstance(layer, int) else jnp.asarray(flags)[layer % len(flags)]

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: Angles,
                 layer: AnyArray, cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        """Apply attention; `layer` is its number."""
        q, k, v = self.project(x_BTD)
        q, k = self.turn(q, k, angles)
        everywhere = self.everywhere(layer)
        if cache is not None and cache.entries is not None:
            return attend_cached(partial(self.returned, x_BTD), q, k, v, cache, jnp.where(everywhere, 0, self.window))
        out = attend_by_layer(everywhere, q, k, v, segments_BT=segments_BT, window=self.window, backend=self.backend,
                              context=self.context)
        return self.returned(x_BTD, out), kept(cache, k, v)
