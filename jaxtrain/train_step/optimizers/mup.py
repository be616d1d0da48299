"""Maximal update parametrization (muP, Yang et al., arXiv 2203.03466): the best learning rate does not move with width.

Initial values and steps are scaled relative to a base model (`model.mup_base`), by how many times as wide the inputs
and the outputs of a parameter are as there, and by which of the two grow at all (table 3 of the paper):

|                          | initial deviation | Adam, Lion, Adafactor | SGD                |
|--------------------------|-------------------|-----------------------|--------------------|
| embeddings, vectors      | 1                 | 1                     | outputs            |
| hidden matrices          | 1 / sqrt(inputs)  | 1 / inputs            | outputs / inputs   |
| output head, routers     | 1 / inputs        | 1 / inputs            | 1 / inputs         |

A tied embedding table counts as embeddings, and logits are divided by the width (table 8). Attention's scores have one
more factor, 1 / sqrt(head_dim) relative to the base. An optimizer with another rule than Adam's has it with it
(`optimizer_parts.rules`).
"""

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import optax

from jaxtrain.sharding.axis_rules import Axes
from jaxtrain.train_step.optimizers.matrices import Dimensions, by_path
from jaxtrain.train_step.optimizers.optimizer_parts import Growth, StepFactor

_GROWTH: ContextVar[Growth | None] = ContextVar("growth", default=None)


@contextlib.contextmanager
def growing(growth: Growth) -> Iterator[None]:
    """A context in which parameters are created for a model that is so much wider than its base."""
    token = _GROWTH.set(growth)
    try:
        yield
    finally:
        _GROWTH.reset(token)


def initial_factor(names: tuple) -> float:
    """Return what the initial deviation of a parameter with these logical names is multiplied by."""
    inputs, outputs = fans(names, _GROWTH.get() or {})
    return 1 / inputs if outputs == 1 else inputs**-0.5


def scale_by_width(step_factor: StepFactor, axes: Axes, growth: Growth) -> list[optax.GradientTransformation]:
    """Return what multiplies an optimizer's steps, for parameters with logical names `axes`; [] for the base."""
    if all(times == 1 for times in growth.values()):
        return []
    names = by_path(axes)

    def one(path, step):
        factor = step_factor(names[path], step.shape, growth)
        return step if factor == 1 else step * factor
    return [optax.stateless(lambda steps, params: jax.tree_util.tree_map_with_path(one, steps))]


def adam_step(names: tuple, shape: tuple[int, ...], growth: Growth) -> float:
    """Return what the steps of Adam, of a parameter with these logical names, are multiplied by; Lion's likewise."""
    return 1 / fans(names, growth)[0]


def fans(names: tuple, growth: Growth) -> tuple[float, float]:
    """Return how many times as many inputs and outputs a parameter has as in the base; a vector has outputs only."""
    return sides(names, [growth.get(name, 1.0) for name in names])


def sides(names: tuple, sizes: Any) -> tuple[float, float]:
    """Return the product of these sizes of a parameter's dimensions over its inputs, and over its outputs."""
    found = Dimensions.of(names)
    columns = found.columns or tuple(i for i in range(len(names)) if i not in found.stacked)
    inputs, outputs = (math.prod(sizes[i] for i in side) for side in (found.rows, columns))
    return inputs, outputs
