"""Attention whose queries are multiplied by a number that grows with their position, as in Llama 4 and Ministral 3."""

import jax
import jax.numpy as jnp

from jaxtrain.base.annotations import PyTree
from jaxtrain.models.attention.rotary import Angles, Rotary
from jaxtrain.models.attention.self_attention import Attention


class PositionScale:
    """Rotary positions, and the factor of queries: 1 + beta x log(1 + how often `length` has passed)."""

    def __init__(self, turns: Rotary, beta: float, length: int):
        self.turns, self.beta, self.length = turns, beta, length

    def angles(self, positions_BT: jax.Array) -> tuple[Angles, jax.Array]:
        """Return the angles, and the factor [B, T, 1, 1] of queries."""
        passed = (positions_BT // self.length)[..., None, None].astype(jnp.float32)
        return self.turns.angles(positions_BT), 1 + self.beta * jnp.log1p(passed)


class PositionScaledAttention(Attention):
    """Grouped-query self-attention with the factor of `PositionScale`."""

    def turn(self, q: jax.Array, k: jax.Array, angles: PyTree) -> tuple[jax.Array, jax.Array]:
        """Return queries and keys, rotated; queries times their factor."""
        angles, factor = angles
        q, k = super().turn(q, k, angles)
        return (q * factor).astype(q.dtype), k
