"""An optimizer: steps of one size, in the direction of the sign of the momentum (signSGD; arXiv 1802.04434)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class SignMomentum:
    """SignMomentum: every step is as long as the learning rate."""

    beta: float = 0.9  # decay rate of the momentum

    def __call__(self, parts):
        """Return the optax transformation; `scaled_by` adds weight decay and the learning rate."""
        sign = optax.stateless(lambda updates, params: jax.tree.map(jnp.sign, updates))
        return parts.scaled_by(optax.chain(optax.trace(self.beta), sign))
