"""Pytrees with leaves that are not arrays, such as Equinox modules: the arrays are trained, the rest is kept."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.base.annotations import PyTree

_ARRAY = object()  # in place of a leaf that is one


@dataclass(frozen=True)
class StaticLeaves:
    """The parts of a pytree besides its arrays: functions, flags, numbers of its classes, and its structure."""

    treedef: Any
    leaves: tuple[Any, ...]  # those that are not arrays, between marks for those that are

    @classmethod
    def split(cls, tree: PyTree) -> "tuple[StaticLeaves | None, Any]":
        """Return the static leaves of a tree, None where it has none; and the tree with None in their places.

        A Python float in nothing but dicts, lists and tuples counts as an array; in a class it is static, like the rate
        of a dropout layer.
        """
        def outer(node: object) -> bool:
            return node is not None and not isinstance(node, dict | list | tuple)

        with_floats = jax.tree.map(lambda node: np.asarray(node, jnp.result_type(float)) if isinstance(node, float)
                                   else node, tree, is_leaf=outer)
        leaves, treedef = jax.tree.flatten(with_floats)
        static = tuple(_ARRAY if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else leaf for leaf in leaves)
        if all(leaf is _ARRAY for leaf in static):
            return None, tree
        arrays = [leaf if mark is _ARRAY else None for leaf, mark in zip(leaves, static, strict=True)]
        return cls(treedef, static), treedef.unflatten(arrays)

    def merge(self, arrays: PyTree) -> PyTree:
        """Return the tree with these arrays, of a tree like the one that `split` returned, and the static leaves."""
        left = iter(jax.tree.leaves(arrays))
        return self.treedef.unflatten([next(left) if leaf is _ARRAY else leaf for leaf in self.leaves])
