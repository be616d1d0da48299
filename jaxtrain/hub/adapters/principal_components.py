"""The principal components of weights, with which PiSSA's adapters of them begin (arXiv 2404.02948).

With W = U S V, of which the largest singular values are kept, A is U sqrt(S / scale) and B is sqrt(S / scale) V, so
that scale x A B is the best approximation of W of this rank. The host factorizes one matrix at a time.
"""

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import scipy.linalg
import scipy.sparse.linalg

from jaxtrain.base.annotations import AnyArray
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.config.sections.tuning_keys import LoraConfig
from jaxtrain.errors import UserError
from jaxtrain.files.work_progress import Work
from jaxtrain.hub.weights import published_weights
from jaxtrain.models import lora
from jaxtrain.train_step import partition
from jaxtrain.train_step.state import Params

DENSE = 256  # smaller matrices are factorized whole


def with_adapters(params: Params, abstract: Params, c: LoraConfig) -> Params:
    """Return parameters with the adapters that they begin with. Every process makes the call.

    Args:
        params: all but the adapters, in a nested dict.
        abstract: all that there are to be, of the dtypes and shardings to give them.
        c: the keys of the adapters.
    """
    flat, wanted = flatten(params), flatten(abstract)
    modules = [path.removesuffix(lora.STARTS[0]) for path in wanted if path.endswith(lora.STARTS[0])]
    found: dict[str, jax.Array] = {}
    with Work("principal components", len(modules)) as work:
        for module in modules:
            found |= _of_module(module, flat, wanted, c)
            work.add(1)
    paths = flatten(lora.adapters(abstract))
    both = jax.tree.unflatten(jax.tree.structure(lora.adapters(abstract)), [found[path] for path in paths])
    return partition.merge(params, both)


def _of_module(module: str, flat: Mapping[str, jax.Array], wanted: Mapping[str, AnyArray],
               c: LoraConfig) -> dict[str, jax.Array]:
    """Return the adapter of a layer, or of all layers of a stack, and the copy of its start."""
    kernel = f"{module.removesuffix(f'{lora.NAME}/')}kernel"
    abstract = {name: wanted[module + name] for name in ("down", "up", *lora.STARTS)}
    if kernel not in flat:
        raise UserError("lora.init", f"pissa needs all weights that it adapts, and train.init_from has no {kernel}",
                        "leave that layer out of lora.targets, or set lora.init=zero")
    layers = lora.stacked(abstract["down"], abstract["up"], flat[kernel])
    inner = int(np.prod(abstract["down"].shape[layers:-1]))
    sides: list[list[np.ndarray]] = [[], []]
    for which in np.ndindex(flat[kernel].shape[:layers]):
        weight = published_weights.kernel_of(kernel, which, flat).reshape(inner, -1)
        if c.rank > min(weight.shape):
            raise UserError("lora.rank", f"{c.rank} is more than the {min(weight.shape)} singular values that {kernel} "
                            "has, with which lora.init=pissa begins", f"set it to {min(weight.shape)} or less, or "
                            "choose other lora.targets")
        if not np.isfinite(weight).all():
            raise UserError("lora.init", f"{kernel} in train.init_from has values that are not finite, and pissa "
                            "begins with its principal components", "begin with another checkpoint")
        for side, x in zip(sides, factors(weight, c.rank, lora.scale(c)), strict=True):
            side.append(x)
    found: dict[str, jax.Array] = {}
    for name, side in zip(("down", "up"), sides, strict=True):
        start = abstract[f"start_{name}"]
        # Both are rounded alike, so that their difference begins at 0.
        whole = np.stack(side).reshape(start.shape).astype(start.dtype)
        for each in (name, f"start_{name}"):
            leaf = abstract[each]
            found[module + each] = jax.make_array_from_callback(
                leaf.shape, leaf.sharding, partial(_part, whole.astype(leaf.dtype)))
    return found


def _part(whole: np.ndarray, index: Any) -> np.ndarray:
    return whole[index]


def factors(weight: np.ndarray, rank: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return A and B, in float32, whose product times the scale is the best approximation of a matrix of this rank."""
    weight = weight.astype(np.float64)
    left, values, right = _decomposed(weight, rank)
    largest = np.argsort(-values)[:rank]
    root = np.sqrt(values[largest] / scale)
    return (left[:, largest] * root).astype(np.float32), (root[:, None] * right[largest]).astype(np.float32)


def _decomposed(weight: np.ndarray, rank: int) -> Any:
    """Return the largest singular values of a matrix, at least `rank` of them, and their vectors."""
    if min(weight.shape) >= max(DENSE, 2 * rank) and weight.any():
        # Lanczos' method is exact, and much faster where the rank is low; it may fail on a degenerate matrix.
        with contextlib.suppress(scipy.sparse.linalg.ArpackError):
            return scipy.sparse.linalg.svds(weight, rank, v0=np.random.default_rng(0).random(min(weight.shape)))
    return scipy.linalg.svd(weight, full_matrices=False)
