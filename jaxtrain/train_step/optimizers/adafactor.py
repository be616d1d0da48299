"""Adafactor's second moments (Shazeer and Stern, arXiv 1804.04235): of a matrix, the means of its rows and columns.

Stacked layers and experts are matrices of their own, each of which is factored and clipped by itself. optax's own
factors the two largest dimensions of an array, whatever they mean, and clips all layers together.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.sharding.axis_rules import Axes
from jaxtrain.train_step.optimizers.matrices import Dimensions, by_path
from jaxtrain.train_step.optimizers.optimizer_parts import OptimizerParts
from jaxtrain.train_step.state import Params

SMALLEST = 128  # the shorter side of the smallest matrix that is factored
THRESHOLD = 1.0  # the largest root mean square of an update
DECAY = 0.8  # the latest of t squares weighs t to the power of -0.8
EPSILON = 1e-30  # added to squared gradients


class AdafactorState(NamedTuple):
    """Second moments. A parameter has either `rows` and `columns` or `full`; elsewhere there is None in its place."""

    count: jax.Array
    rows: Any  # one number a row: the dimensions that the mean is over have size 1
    columns: Any
    full: Any  # one number for each element of what is not factored


def adafactor(parts: OptimizerParts) -> optax.GradientTransformation:
    """Return Adafactor."""
    return parts.scaled_by(scale_by_adafactor(parts.axes))


def scale_by_adafactor(axes: Axes) -> optax.GradientTransformation:
    """Return Adafactor without a step size of its own, for parameters with logical names `axes`."""
    dimensions = {path: Dimensions.of(names) for path, names in by_path(axes).items()}

    def is_factored(path, x):
        sides = dimensions[path].rows, dimensions[path].columns
        return all(side and math.prod(x.shape[i] for i in side) >= SMALLEST for side in sides)

    def init(params: Params) -> AdafactorState:
        flat, treedef = jax.tree_util.tree_flatten_with_path(params)

        def zeros(x, over=()):
            return jnp.zeros([1 if i in over else size for i, size in enumerate(x.shape)], jnp.float32)

        rows = [zeros(x, dimensions[path].columns) if is_factored(path, x) else None for path, x in flat]
        columns = [zeros(x, dimensions[path].rows) if is_factored(path, x) else None for path, x in flat]
        full = [None if is_factored(path, x) else zeros(x) for path, x in flat]
        return AdafactorState(jnp.zeros((), jnp.int32), *map(treedef.unflatten, (rows, columns, full)))

    def update(updates: optax.Updates, state: Any, params: Params = None) -> tuple[optax.Updates, AdafactorState]:
        count = state.count + 1
        weight = count.astype(jnp.float32) ** -DECAY
        flat, treedef = jax.tree_util.tree_flatten_with_path(updates)

        def one(path, grad, rows, columns, full):
            d, square = dimensions[path], jnp.square(grad.astype(jnp.float32)) + EPSILON
            if is_factored(path, grad):
                rows = (1 - weight) * rows + weight * square.mean(d.columns, keepdims=True)
                columns = (1 - weight) * columns + weight * square.mean(d.rows, keepdims=True)
                step = grad * jax.lax.rsqrt(rows / rows.mean(d.rows, keepdims=True)) * jax.lax.rsqrt(columns)
            else:
                full = (1 - weight) * full + weight * square
                step = grad * jax.lax.rsqrt(full)
            layer = tuple(i for i in range(grad.ndim) if i not in d.stacked)
            size = jnp.sqrt(jnp.square(step).mean(layer, keepdims=True))
            return step / jnp.maximum(1.0, size / THRESHOLD), rows, columns, full

        trees = [treedef.flatten_up_to(tree) for tree in state[1:]]
        done = [one(path, grad, *moments) for (path, grad), *moments in zip(flat, *trees, strict=True)]
        steps, *after = (treedef.unflatten(leaves) for leaves in zip(*done, strict=True))
        return steps, AdafactorState(count, *after)

    return optax.GradientTransformation(init, update)
