"""The optimizer's state in the hosts' memory: in each step it comes to the devices and goes back, piece by piece.

A piece is the state of one parameter (of a stack of layers, all of them). The next one is fetched when the one before
is updated, so that the devices hold a piece or two of it and never the whole.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxtrain.state import HOST, Layout

# Parameters, their state, their gradients, whether to take the step -> new parameters and state.
Update = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def by_pieces(layout: Layout, optimizer: Callable[[Any], optax.GradientTransformation],
              updating: Callable[[optax.GradientTransformation, Any], Update]) -> Update:
    """An update of everything, that has a piece of the state on the devices at a time.

    Args:
        optimizer: the optimizer of parameters whose logical names are given. It may mix none with another.
        updating: the update of a part, of its optimizer and the shardings of its parameters and their state.
    """
    def update(params, opt_state, grads, taken):
        flat, treedef = jax.tree_util.tree_flatten_with_path(params)
        others = [treedef.flatten_up_to(tree) for tree in (grads, layout.axes, layout.state.params)]
        state_keys, state_treedef = _keys(opt_state)
        before = dict(zip(state_keys, jax.tree.leaves(opt_state), strict=True))
        homes = dict(zip(state_keys, jax.tree.leaves(layout.state.opt_state), strict=True))
        new_params, after, here = [], {}, {}
        for (path, param), grad, names, where in zip(flat, *others, strict=True):
            part = optimizer(_alone(path, names))
            shapes = jax.eval_shape(part.init, _alone(path, param))
            keys, part_treedef = _keys(shapes)  # named as in the whole, of which it is a part
            piece, here = jax.lax.optimization_barrier(([before[key] for key in keys], here))
            after |= _back(here, homes)
            piece = part_treedef.unflatten([fetched(x) for x in piece])
            shardings = _alone(path, where), part_treedef.unflatten([homes[key] for key in keys])
            new, piece = updating(part, shardings)(_alone(path, param), piece, _alone(path, grad), taken)
            new_params += jax.tree.leaves(new)
            here = dict(zip(keys, jax.tree.leaves(piece), strict=True))
        after |= _back(here, homes)
        return treedef.unflatten(new_params), state_treedef.unflatten([after[key] for key in state_keys])

    return update


def fetched(x: Any) -> Any:
    """In a compiled function: an array on the devices, wherever it was."""
    return jax.device_put(x, jax.memory.Space.Device) if jax.typeof(x).memory_space == jax.memory.Space.Host else x


def _back(here: dict, homes: dict) -> dict:
    return {key: jax.device_put(x, jax.memory.Space.Host) if homes[key].memory_kind == HOST else x
            for key, x in here.items()}


def _keys(tree: Any) -> tuple[list[str], Any]:
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path) for path, _ in flat], treedef


def _alone(path: tuple, leaf: Any) -> Any:
    """The nested dict that has only this leaf."""
    for key in reversed(path):
        leaf = {key.key: leaf}
    return leaf
