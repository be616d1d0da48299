"""The further sums of a loss, among which are numbers that are not added over parts of a batch: the largest counts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxtrain.base.annotations import PyTree

LARGEST = "largest"  # the further sum, or auxiliary value of layers, whose arrays are maxima
NOTHING = -1e30  # the largest of no numbers


def by_kind(add: Callable[..., PyTree], larger: Callable[..., PyTree], *trees: PyTree) -> PyTree:
    """Return what `add` makes of sums in trees of them, and `larger` of maxima."""
    return jax.tree_util.tree_map_with_path(lambda path, *each: (larger if is_largest(path) else add)(*each), *trees)


def is_largest(path: jax.tree_util.KeyPath) -> bool:
    """Return whether the leaf at this path is a maximum."""
    return any(getattr(key, "key", None) == LARGEST for key in path)


def none_of(sums: PyTree, lead: tuple[int, ...] = (), dtype: DTypeLike | None = None) -> PyTree:
    """Return sums of nothing, shaped like these behind further dimensions."""
    def full(value: float) -> Callable[[jax.ShapeDtypeStruct], jax.Array]:
        return lambda x: jnp.full((*lead, *x.shape), value, dtype or x.dtype)
    return by_kind(full(0), full(NOTHING), sums)
