"""Attention whose queries and keys are normalised after they have turned."""

import jax

from jaxtrain.models.attention.rotary import Angles, Rotary
from jaxtrain.models.attention.self_attention import Attention


class NormLastAttention(Attention):
    """Grouped-query self-attention with norms behind the rotation."""

    def project(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries, keys and values as they are."""
        return self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)

    def turn(self, q: jax.Array, k: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array]:
        """Return queries and keys, rotated and then normalised."""
        return self.normalised(Rotary.rotate(q, angles), Rotary.rotate(k, angles))
