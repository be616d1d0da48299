"""The state as a flat mapping from paths to arrays, as it is on disk and in memory."""

from typing import Any

import jax
import numpy as np


def flatten(tree: Any) -> dict[str, Any]:
    """Path such as `params/layers/query` -> leaf."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    assert len(flat) == len(leaves), "two leaves of the state have one path"
    return flat


def describe(leaf: Any) -> str:
    """Dtype and shape, in words."""
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
