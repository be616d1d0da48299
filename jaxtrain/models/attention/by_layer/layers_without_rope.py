"""Attention of layers in one stack, of which every few one has no rotary positions."""

from typing import Any

import jax
import jax.numpy as jnp

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

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: Angles, layer: jax.Array,
                 cache: Cache | None = None) -> tuple[jax.Array, dict[str, Any]]:
        """Apply attention; `layer` is its number."""
        (cos, sin), turns = angles, (layer + 1) % self.every != 0
        return super().__call__(x_BTD, segments_BT, (jnp.where(turns, cos, 1), jnp.where(turns, sin, 0)), cache)
