"""The fragments in which parameters are exchanged: layers in strides, so that each has some of every depth.

Streaming DiLoCo (arXiv 2501.18512) sends one fragment after the other. Whatever is not a layer, such as an embedding,
goes to the fragment that is smallest so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxtrain.base.annotations import AnyArray, PyTree
from jaxtrain.errors import UserError
from jaxtrain.sharding.axis_rules import Axes, Names


@dataclass(frozen=True)
class Piece:
    """A part of one array: the whole, or some of its layers."""

    leaf: int  # its number among the arrays of the parameters
    start: int = 0
    stride: int = 0  # 0: the whole

    def of(self, array: np.ndarray) -> np.ndarray:
        """Return the part, as a view."""
        return array[self.start::self.stride] if self.stride else array

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of an array of this shape."""
        return (len(range(self.start, whole[0], self.stride)), *whole[1:]) if self.stride else whole


Fragment = tuple[Piece, ...]


def fragments(params: PyTree, axes: Axes, count: int) -> list[Fragment]:
    """Return the pieces of each fragment.

    Args:
        params: a tree of arrays, or of their shapes.
        axes: the logical names of each array, as a tuple, or None.
    """
    leaves, names = _named(params, axes)
    found: list[list[Piece]] = [[] for _ in range(count)]
    sizes = [0] * count
    whole = [i for i, name in enumerate(names) if count == 1 or not name or name[0] != "layers"]
    for i in sorted(set(range(len(leaves))) - set(whole)):
        layers = leaves[i].shape[0]
        for f in range(min(count, layers)):
            found[f].append(Piece(i, f, count))
            sizes[f] += leaves[i].size // layers * len(range(f, layers, count))
    for i in sorted(whole, key=lambda i: (-leaves[i].size, i)):
        smallest = sizes.index(min(sizes))
        found[smallest].append(Piece(i))
        sizes[smallest] += leaves[i].size
    if not all(found):
        raise UserError("diloco.fragments", f"the model does not divide into {count} parts", "use fewer")
    return [tuple(sorted(pieces, key=lambda piece: piece.leaf)) for pieces in found]


def shapes(fragment: Fragment, params: PyTree, axes: Axes) -> list[tuple[Names | None, tuple[int, ...]]]:
    """Return the logical names and the shape of each piece."""
    leaves, names = _named(params, axes)
    return [(names[piece.leaf], piece.shape(leaves[piece.leaf].shape)) for piece in fragment]


def _named(params: PyTree, axes: Axes) -> tuple[list[AnyArray], list[Names | None]]:
    leaves, treedef = jax.tree.flatten(params)
    return leaves, treedef.flatten_up_to(axes) if axes is not None else [None] * len(leaves)


def flat(fragment: Fragment, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return a fragment of these arrays as one vector of float32."""
    return np.concatenate([piece.of(arrays[piece.leaf]).astype(np.float32).ravel() for piece in fragment])


def put(fragment: Fragment, arrays: Sequence[np.ndarray], vector: np.ndarray) -> None:
    """Write a vector back into the fragment of these arrays."""
    at = 0
    for piece in fragment:
        view = piece.of(arrays[piece.leaf])
        view[...] = vector[at:at + view.size].reshape(view.shape)
        at += view.size
