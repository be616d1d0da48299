"""Optimizers and learning-rate schedules by the names that a config has for them (config/part_tables.py)."""

from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.base.annotations import PyTree
from jaxtrain.config import part_tables
from jaxtrain.config.schema import OptimizerConfig
from jaxtrain.sharding.axis_rules import Axes
from jaxtrain.train_step.optimizers import moments, mup
from jaxtrain.train_step.optimizers.optimizer_parts import OptimizerParts


def make_schedule(c: OptimizerConfig, steps: int, options: Any = None) -> optax.Schedule:
    """Return the schedule of this name behind a linear warm-up from 1/n of the peak. `options`: its own."""
    body = part_tables.SCHEDULES.made(c.schedule, options)(c, max(1, steps - c.warmup_steps))
    if not c.warmup_steps:
        return body
    # Step 0 already learns: the first of n warm-up steps has 1/n of the peak.
    peak = c.learning_rate
    warmup = optax.linear_schedule(peak / c.warmup_steps, peak, max(1, c.warmup_steps - 1))
    return optax.join_schedules([warmup, body], [c.warmup_steps])


def with_update_rules(optimizer: optax.GradientTransformation, updates: PyTree,
                      router_bias_rate: float) -> optax.GradientTransformation:
    """Return the optimizer, replaced by an update rule for the parameters whose entry in `updates` names one.

    The structure of its state does not depend on `updates`: the state of a part is named as in the whole.
    """
    if not router_bias_rate:
        return optimizer
    rules: dict[Hashable, optax.GradientTransformation] = {
        name: make(router_bias_rate) for name, make in UPDATE_RULES.items()}
    return optax.partition(rules | {"": optimizer}, updates)


def _balance_load(rate: float) -> optax.GradientTransformation:
    """Lower the bias of experts with more than an even share of the load by `rate`, and raise it for those with less.

    The gradient of a router's bias is not a slope but its experts' excess load (models/experts/router.py).
    """
    def one(excess):
        # An excess of less than a millionth of a share is rounding.
        return jnp.where(jnp.abs(excess) < 1e-6, 0.0, -rate * jnp.sign(excess))
    return optax.stateless(lambda grads, params: jax.tree.map(one, grads))


# Update rules that a parameter's metadata may name. These gradients do not count in the gradient norm and clipping.
UPDATE_RULES = {"balance_load": _balance_load}


def make_optimizer(c: OptimizerConfig, schedule: optax.Schedule, axes: Axes,
                   growth: Mapping[str, float] | None = None, options: Any = None) -> optax.GradientTransformation:
    """Return the optimizer for parameters with logical names `axes` (a tree of tuples, structured like the parameters).

    Args:
        growth: how many times as wide each logical axis is as where the learning rate was found (`model.mup_base`).
        options: those of an optimizer of another package.
    """
    optimizer = part_tables.OPTIMIZERS.made(c.name, options)
    by_width = mup.scale_by_width(getattr(optimizer, "step_factor", mup.adam_step), axes, growth or {})
    made = optimizer(OptimizerParts(c, axes, schedule, by_width))
    return made if c.moment_dtype == "float32" else moments.rounded(made, c.moment_dtype, axes)


def global_norm(tree: PyTree) -> jax.Array:
    """Return the Euclidean norm over all leaves, in float32."""
    parts = [part for leaf in jax.tree.leaves(tree)
             for part in ((leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,))]
    return jnp.sqrt(sum(jnp.sum(jnp.square(part.astype(jnp.float32))) for part in parts))
