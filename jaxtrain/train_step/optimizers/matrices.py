"""The parameters that are matrices, and the dimensions that are their sides, by the parameters' logical names."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxtrain.base.annotations import PyTree
from jaxtrain.sharding.axis_rules import Axes, Names

_STACKED = ("layers", "every_layer", "experts", "every_expert")  # each has a matrix, or a vector, of its own


@dataclass(frozen=True)
class Dimensions:
    """The dimensions of a parameter. `rows` and `columns` are those of each matrix in it; a vector has none."""

    stacked: tuple[int, ...]  # layers and experts
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()

    @classmethod
    def of(cls, names: tuple) -> "Dimensions":
        """Return the dimensions of a parameter with these logical names; heads count as flattened."""
        stacked = tuple(i for i, name in enumerate(names) if name in _STACKED)
        if not is_matrix(names):
            return cls(stacked)
        own = [i for i in range(len(names)) if i not in stacked]
        side = next((i for i in own if names[i] in ("embed", "expert_embed", "rank", "lora")), own[0])
        others = tuple(i for i in own if i != side)
        return cls(stacked, *(((side,), others) if side == own[0] else (others, (side,))))


def is_matrix(names: tuple) -> bool:
    """Return whether a parameter is a matrix or a convolution, which decays; biases, norms and other vectors do not."""
    return "norm" not in names and sum(name not in ("head_dim", *_STACKED) for name in names) > 1


def map_names(function: Callable[[Names], object], axes: Axes) -> PyTree:
    """Return the tree of what `function` makes of the logical names of each parameter."""
    return jax.tree.map(function, axes, is_leaf=lambda x: isinstance(x, tuple))


def by_path(axes: Axes) -> dict[tuple, Names]:
    """Return the logical names of each parameter by its path, as `tree_flatten_with_path` has it."""
    return dict(jax.tree_util.tree_flatten_with_path(axes, is_leaf=lambda x: isinstance(x, tuple))[0])
