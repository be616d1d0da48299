"""The state of the outer optimizer of islands, an entry of a state's `extras` (jaxtrain/diloco has what changes it).

    params      the outer parameters: those that all islands agree on
    position    the number of the last entry of the log that is in them
    open        the number of the entry that an offer under way is meant for; 0: none is; DUE: one is to be made
    and what else the outer optimizer keeps for every parameter, such as momentum
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxtrain.base.annotations import PyTree
from jaxtrain.train_step.state import Params

NAME = "outer"  # in a state's extras
DUE = -1  # of a run that was stopped, or saved, before it had offered what it should have, or before that was an entry


def begin(kept: Sequence[str]) -> Callable[[Params], dict[str, PyTree]]:
    """Return a function that makes the state from the parameters at step 0.

    `kept`: names of what is kept for every parameter besides its value; all of it begins at zero.
    """
    def of(params: Params) -> dict[str, PyTree]:
        zeros = {name: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params) for name in kept}
        own = jax.tree.map(lambda p: jnp.copy(p.astype(jnp.float32)), params)
        return {"params": own, "position": jnp.zeros((), jnp.int32), "open": jnp.zeros((), jnp.int32), **zeros}
    return of
