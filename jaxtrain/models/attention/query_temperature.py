"""The temperature of attention over long contexts: a factor of queries, which grows with their positions.

Llama 4 has it in its layers without rotary positions, Ministral 3 and Mistral 4 in all (scalable softmax, arXiv
2501.19399).
"""

import jax
import jax.numpy as jnp

from jaxtrain.base.annotations import PyTree
from jaxtrain.models.attention.rotary import Angles, Rotary
from jaxtrain.models.attention.self_attention import Attention


class Tempered:
    """Rotary positions, and beside their angles the factor of queries at each position.

    The factor is 1 + strength x log(1 + floor((position + ahead) / length)).
    """

    def __init__(self, rotary: Rotary, strength: float, length: int, ahead: int = 0):
        self.rotary, self.strength, self.length, self.ahead = rotary, strength, length, ahead

    def angles(self, positions_BT: jax.Array) -> tuple[Angles, jax.Array]:
        """Return the angles, and the factor [B, T, 1, 1]."""
        times = jnp.floor((positions_BT.astype(jnp.float32) + self.ahead) / self.length)
        return self.rotary.angles(positions_BT), (1 + self.strength * jnp.log1p(times))[..., None, None]


class TemperedAttention(Attention):
    """Grouped-query self-attention with the factor that `Tempered` has beside the angles."""

    def turn(self, q: jax.Array, k: jax.Array, angles: PyTree) -> tuple[jax.Array, jax.Array]:
        """Return queries and keys, rotated; queries times their factor."""
        angles, factor = angles
        q, k = super().turn(q, k, angles)
        return (q * factor).astype(q.dtype), k
