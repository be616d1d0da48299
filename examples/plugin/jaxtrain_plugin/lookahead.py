"""An extension: Lookahead (arXiv 1907.08610), slow weights that follow those of the optimizer."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

import jaxtrain as jt


@dataclass(frozen=True)
class Lookahead(jt.Extension):
    """Lookahead: every few steps the weights go a part of the way from where they were to where the optimizer is."""

    every: int = 5  # steps between two moves of the slow weights
    rate: float = 0.5  # the part of the way that they go

    def __post_init__(self):
        if not 0 < self.rate <= 1:
            raise jt.UserError("lookahead.rate", f"{self.rate} is not in (0, 1]", "try 0.5")

    def extra_state(self):
        """Return the slow weights: laid out like the parameters, saved and restored with the state."""
        return {"slow": lambda params: jax.tree.map(jnp.copy, params)}

    def after_update(self, params, extras, taken, step):
        """Return both kinds of weights after a step; it is traced with the step."""
        due = (step + 1) % self.every == 0
        slow = jax.tree.map(lambda a, b: jnp.where(due, a + self.rate * (b - a), a), extras["slow"], params)
        return jax.tree.map(lambda a, b: jnp.where(due, a, b), slow, params), extras | {"slow": slow}
