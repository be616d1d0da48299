"""The parameters that are matrices, and the dimensions that are their sides, by the parameters' logical names."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxtrain.base.annotations import PyTree
from jaxtrain.sharding import axis_rules, mesh_context
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


@dataclass(frozen=True)
class Home:
    """The layout at rest of a stack of matrices: in how many parts each stacked dimension is, and over which axes."""

    axes: tuple[tuple[str, int], ...] = ()  # with their sizes
    parts: tuple[int, ...] = ()

    @classmethod
    def of(cls, names: tuple, shape: tuple[int, ...], own: Dimensions) -> "Home":
        """Return that of a parameter with these logical names, on the mesh and under the rules of the traced code."""
        none = cls((), (1,) * len(own.stacked))
        if (here := mesh_context.current()) is None or len(names) != len(shape):
            return none
        mesh, rules = here
        entries = [axis_rules.axes_of(entry) for entry in axis_rules.at_rest(names, shape, rules, mesh)]
        split = [entries[i] if i < len(entries) else () for i in own.stacked]
        parts = tuple(math.prod(mesh.shape[axis] for axis in axes) for axes in split)
        if any(shape[i] % size for i, size in zip(own.stacked, parts, strict=True)):
            return none  # such as one layer of several that a pipeline has
        return cls(tuple((axis, mesh.shape[axis]) for axes in split for axis in axes), parts)


def as_stack(x: jax.Array, own: Dimensions, home: Home) -> jax.Array:
    """Return the matrices of a parameter as [groups, matrices of each, rows, columns]; a group lies on its devices."""
    sizes = [size for i, parts in zip(own.stacked, home.parts, strict=True) for size in (parts, x.shape[i] // parts)]
    sides = [math.prod(x.shape[i] for i in side) for side in (own.rows, own.columns)]
    x = x.transpose(own.stacked + own.rows + own.columns).reshape(*sizes, *sides)
    order = _apart(len(home.parts))
    return x.transpose(*order, *range(len(order), x.ndim)).reshape(math.prod(home.parts), -1, *sides)


def from_stack(stack: jax.Array, own: Dimensions, home: Home, shape: tuple[int, ...]) -> jax.Array:
    """Return the parameter that `as_stack` took apart."""
    order, dims = _apart(len(home.parts)), own.stacked + own.rows + own.columns
    each = [shape[i] // parts for i, parts in zip(own.stacked, home.parts, strict=True)]
    x = stack.reshape(*home.parts, *each, *stack.shape[2:])
    x = x.transpose(*(order.index(i) for i in range(len(order))), *range(len(order), x.ndim))
    return x.reshape([shape[i] for i in dims]).transpose([dims.index(i) for i in range(len(dims))])


def _apart(stacked: int) -> list[int]:
    """Return the order that puts the parts of all stacked dimensions before what is in a part."""
    return [*range(0, 2 * stacked, 2), *range(1, 2 * stacked, 2)]


def is_matrix(names: tuple) -> bool:
    """Return whether a parameter is a matrix or a convolution, which decays; biases, norms and other vectors do not."""
    return "norm" not in names and sum(name not in ("head_dim", *_STACKED) for name in names) > 1


def map_names(function: Callable[[Names], object], axes: Axes) -> PyTree:
    """Return the tree of what `function` makes of the logical names of each parameter."""
    return jax.tree.map(function, axes, is_leaf=lambda x: isinstance(x, tuple))


def by_path(axes: Axes) -> dict[tuple, Names]:
    """Return the logical names of each parameter by its path, as `tree_flatten_with_path` has it."""
    return dict(jax.tree_util.tree_flatten_with_path(axes, is_leaf=lambda x: isinstance(x, tuple))[0])
