"""Split nested dicts of parameters into a trained and a frozen part, and merge the parts again.

A part is a nested dict that lacks the other part's leaves, so that optimizers, gradients and norms need not know of it.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import jax

from jaxtrain.base.annotations import PyTree
from jaxtrain.errors import UserError, nearest


def merge(*parts: PyTree) -> PyTree:
    """Merge parts into one nested dict of all leaves; a tree that is not a dict may only be merged with empty parts."""
    parts = tuple(part for part in parts if not (isinstance(part, dict) and not part))
    if not parts:
        return {}
    if len(parts) == 1:
        return parts[0]
    merged: dict = {}
    for part in parts:
        for key, value in part.items():
            merged[key] = merge(merged[key], value) if key in merged else value
    return merged


def like(tree: PyTree, part: PyTree) -> PyTree:
    """Return the leaves of `tree` at the paths in `part`."""
    if not isinstance(part, dict):
        return tree
    return {key: like(tree[key], inner) for key, inner in part.items() if key in tree}


def without(tree: PyTree, part: dict) -> PyTree:
    """Return the leaves of `tree` at the paths not in `part`; a tree that is not a dict only loses an empty part."""
    if not part:
        return tree
    kept = {key: without(value, part[key]) if key in part and isinstance(value, dict) else value
            for key, value in tree.items() if key not in part or isinstance(value, dict)}
    return {key: value for key, value in kept.items() if key not in part or value}


def split(tree: dict, is_frozen: Callable[[str], bool]) -> tuple[dict, dict]:
    """Split into (trained, frozen) by the path of each leaf, such as "blocks/attention/q/kernel"."""
    def part(tree: dict, wanted: bool, prefix: str) -> dict:
        found = {}
        for key, value in tree.items():
            path = f"{prefix}{key}"
            if isinstance(value, dict):
                if inner := part(value, wanted, f"{path}/"):
                    found[key] = inner
            elif is_frozen(path) == wanted:
                found[key] = value
        return found

    return part(tree, False, ""), part(tree, True, "")


def frozen_paths(axes: dict, freeze: Sequence[str], trainable: Sequence[str]) -> set[str]:
    """Return the paths of the parameters that are not trained.

    Args:
        axes: the tuple of logical axis names of each parameter, in a nested dict.
        freeze: patterns of what is frozen; a pattern is a path with wildcards or a logical axis name.
        trainable: patterns of the only parameters to train; not together with `freeze`.
    """
    if freeze and trainable:
        raise UserError("train.freeze", "train.trainable already sets what is trained", "give one of the two")
    flat, _ = jax.tree_util.tree_flatten_with_path(axes, is_leaf=lambda x: isinstance(x, tuple) or x is None)
    names = {jax.tree_util.keystr(path, simple=True, separator="/"): names or () for path, names in flat}
    key, patterns = ("train.trainable", trainable) if trainable else ("train.freeze", freeze)
    chosen: set[str] = set()
    for pattern in patterns:
        matching = {path for path, axes in names.items() if fnmatchcase(path, pattern) or pattern in axes}
        if not matching:
            known = [*names, *{name for axes in names.values() for name in axes if name}]
            raise UserError(key, f"no parameter's path or logical axis matches {pattern!r}", nearest(pattern, known))
        chosen |= matching
    frozen = set(names) - chosen if trainable else chosen
    if frozen == set(names):
        raise UserError(key, "it freezes every parameter, so that nothing is left to train", "freeze fewer")
    return frozen
