"""The state as a flat mapping from paths to arrays, as stored in checkpoints and snapshots."""

from collections.abc import Mapping

import jax
import numpy as np

from jaxtrain.base.annotations import AnyArray, PyTree
from jaxtrain.config.sections.earlier_keys import RENAMED_PARAMETERS

_EARLIER = {now: before for before, now in RENAMED_PARAMETERS.items()}


def flatten(tree: PyTree) -> dict[str, AnyArray]:
    """Return a mapping from paths such as `params/layers/query` to leaves."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    assert len(flat) == len(leaves), "two leaves of the state have one path"
    return flat


def path_in(saved: Mapping[str, object], path: str) -> str:
    """Return the path of an array in a checkpoint with the paths `saved`: or the earlier one that it has there."""
    before = "/".join(_EARLIER.get(part, part) for part in path.split("/"))
    return before if before in saved and path not in saved else path


def describe(leaf: AnyArray) -> str:
    """Return the dtype and shape as text, such as `float32[4, 16]`."""
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
