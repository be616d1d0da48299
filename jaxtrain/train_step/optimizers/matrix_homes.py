"""The devices on which the matrices of a parameter lie at rest, and the parameter as a stack that leaves them there."""

import math
from dataclasses import dataclass

import jax

from jaxtrain.sharding import axis_rules, mesh_context
from jaxtrain.train_step.optimizers.matrices import Dimensions


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
