"""Parameters from outside, such as a published checkpoint's, in the layout of a run, and a run's on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxtrain.base import arguments
from jaxtrain.errors import UserError
from jaxtrain.train_step.state import Params, TrainState


def placed(params: Any, abstract: Params) -> Params:
    """Return these parameters in the dtypes and shardings of `abstract`; refuse a tree with others, naming the first.
    """
    given, wanted = (dict(jax.tree_util.tree_flatten_with_path(tree)[0]) for tree in (params, abstract))
    for path in (*wanted, *given):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if path not in given:
            raise UserError("params", f"they lack {name}", "give every parameter of the model")
        if path not in wanted:
            raise UserError("params", f"they have {name}, which the model does not", "leave it out")
        if np.shape(given[path]) != wanted[path].shape:
            raise UserError("params", f"{name} has the shape {list(np.shape(given[path]))}, and the model's "
                            f"{list(wanted[path].shape)}", "give parameters of this config's model")
    treedef = jax.tree.structure(abstract)
    return treedef.unflatten([jax.device_put(jnp.asarray(given[path], to.dtype), to.sharding)
                              for path, to in wanted.items()])


def of_state(state: Any) -> TrainState:
    """Return a state; refuse what is not one, such as parameters."""
    if not hasattr(state, "all_params"):
        raise UserError("state", f"it is {arguments.kind(state)}, not a jt.TrainState",
                        "give what init or the last step returned")
    return state


def on_one_device(params: Any, dtype: DTypeLike | None = None) -> Params:
    """Return parameters whole on the first device here, those of floating point in `dtype` if one is given."""
    def one(x):
        x = np.array(x)
        return jax.device_put(x.astype(dtype) if dtype and jnp.issubdtype(x.dtype, jnp.floating) else x, device)
    device = jax.local_devices()[0]
    return jax.tree.map(one, params)
