"""A schedule: the learning rate falls with the square root of the step (Vaswani et al., arXiv 1706.03762)."""

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class InverseRoot:
    """InverseRoot: the learning rate falls with the square root of the step."""

    timescale: int = 100  # steps after the warm-up in which it falls to 0.7 of the peak

    def __call__(self, c, steps):
        """Return the learning rate of each step after the warm-up, of which the run has `steps`."""
        return lambda step: c.learning_rate / jnp.sqrt(1 + step / self.timescale)
