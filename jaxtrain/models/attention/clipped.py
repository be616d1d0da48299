"""Attention whose queries, keys and values are clipped."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.models.attention.self_attention import Attention


class ClippedAttention(Attention):
    """Grouped-query self-attention on queries, keys and values between -`clip` and `clip`."""

    unclippable = "queries and keys are clipped already (model.clip_qkv)"

    def __init__(self, clip: float, *args: Any, **how: Any):
        super().__init__(*args, **how)
        self.clip = clip

    def project(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries, keys and values, clipped."""
        q, k, v = (jnp.clip(part(x_BTD), -self.clip, self.clip) for part in (self.q, self.k, self.v))
        return *self.normalised(q, k), v
