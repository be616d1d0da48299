"""Attention of layers in one stack, of which every few one has no rotary positions."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.base.annotations import AnyArray
from jaxtrain.models.attention.kv_cache import Cache
from jaxtrain.models.attention.rotary import Angles
from jaxtrain.models.attention.self_attention import Attention


class AttentionWithoutRope(Attention):
    """Grouped-query self-attention; the number of the layer says whether queries and keys turn."""

    numbered = True

    def __init__(self, every: int, *args: Any, **how: Any):
        """`every`: each N-th layer has no positions."""
        super().__init__(*args, **how)
        self.every = every

    def everywhere(self, layer: AnyArray) -> AnyArray:
        """Return whether the layer with this number has no positions."""
        return (layer + 1) % self.every == 0

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: Angles, layer: AnyArray,
                 cache: Cache | None = None) -> tuple[jax.Array, dict[str, Any]]:
        """Apply attention; `layer` is its number."""
        (cos, sin), everywhere = angles, self.everywhere(layer)
        turn = jnp.where(everywhere, 1, cos), jnp.where(everywhere, 0, sin)
        return super().__call__(x_BTD, segments_BT, turn, cache)
