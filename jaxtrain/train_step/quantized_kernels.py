"""Nested dicts of parameters in which kernels rest in 8 or 4 bits beside their scales, and the same as floats."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxtrain.base.annotations import PyTree
from jaxtrain.train_step import quantization

KERNEL, SCALES = "kernel", "scales"


def as_floats(tree: PyTree, dtype: DTypeLike | None = jnp.float32) -> PyTree:
    """Return the tree with the shapes of whole kernels and without scales: of abstract arrays, or of logical names."""
    if not isinstance(tree, dict):
        return tree
    found = {key: as_floats(inner, dtype) for key, inner in tree.items() if key != SCALES}
    if SCALES in tree and hasattr(tree[KERNEL], "shape"):
        values = tree[KERNEL]
        found[KERNEL] = jax.ShapeDtypeStruct(quantization.shape_of(values, tree[SCALES]), dtype,
                                             sharding=getattr(values, "sharding", None))
    return found


def are_quantized(params: Any) -> bool:
    """Return whether some kernel has scales beside it."""
    return isinstance(params, dict) and (SCALES in params or any(map(are_quantized, params.values())))


def quantized_like(abstract: PyTree, params: Any) -> PyTree:
    """Return parameters with those kernels quantized that `abstract` has in few bits, unless they are already."""
    if not isinstance(params, dict):
        return params
    found = {key: quantized_like(abstract[key], inner) for key, inner in params.items()}
    if SCALES in abstract and KERNEL in params and SCALES not in params:
        found[KERNEL], found[SCALES] = quantization.quantize_like(abstract[KERNEL], abstract[SCALES], params[KERNEL])
    return found
