"""The exponential moving average of the trained parameters, an entry of a state's `extras`.

It begins at the initial parameters, so that no bias has to be corrected. It is at least as exact as float32: with a
decay near 1 a step adds less than fewer bits can hold.
"""

from typing import Any

import jax
import jax.numpy as jnp

NAME = "ema"  # in a state's extras


def begin(params: Any) -> Any:
    """Return the average as it begins: a copy of the parameters, whose memory a step reuses."""
    return jax.tree.map(lambda p: jnp.copy(p.astype(jnp.promote_types(p.dtype, jnp.float32))), params)


def updated(average: Any, params: Any, decay: float, taken: jax.Array) -> Any:
    """Return decay x average + (1 - decay) x params, or the same average where the step was not taken."""
    share = jnp.where(taken, 1 - decay, 0)

    def one(a, p):
        return a + share.astype(a.dtype) * (p.astype(a.dtype) - a)
    return jax.tree.map(one, average, params)
