"""Optimizers, learning-rate schedules, and which parameters have weight decay; made of optax's parts and our own."""

from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.schema import OptimizerConfig
from jaxtrain.train_step.optimizers import moments, mup
from jaxtrain.train_step.optimizers.adafactor import scale_by_adafactor
from jaxtrain.train_step.optimizers.matrices import is_matrix, map_names
from jaxtrain.train_step.optimizers.muon import scale_by_muon


def make_schedule(c: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return a schedule with linear warm-up from 1/n of the peak, the named decay, and `final_fraction` at the end."""
    peak, final, after = c.learning_rate, c.learning_rate * c.final_fraction, max(1, steps - c.warmup_steps)
    decay = max(1, min(after, round(c.decay_fraction * steps)))
    body = {
        "constant": lambda: optax.constant_schedule(peak),
        "cosine": lambda: optax.cosine_decay_schedule(peak, after, alpha=c.final_fraction),
        "linear": lambda: optax.linear_schedule(peak, final, after),
        "wsd": lambda: optax.linear_schedule(peak, final, decay, transition_begin=max(0, after - decay)),
    }[c.schedule]()
    if not c.warmup_steps:
        return body
    # Step 0 already learns: the first of n warm-up steps has 1/n of the peak.
    warmup = optax.linear_schedule(peak / c.warmup_steps, peak, max(1, c.warmup_steps - 1))
    return optax.join_schedules([warmup, body], [c.warmup_steps])


def with_update_rules(optimizer: optax.GradientTransformation, updates: Any,
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


def make_optimizer(c: OptimizerConfig, schedule: optax.Schedule, axes: Any,
                   growth: Mapping[str, float] | None = None) -> optax.GradientTransformation:
    """Return the optimizer for parameters with logical names `axes` (a tree of tuples, structured like the parameters).

    `growth`: how many times as wide each logical axis is as where the learning rate was found (`model.mup_base`).
    """
    made = _named(c, schedule, axes, mup.scale_by_width(c.name, axes, growth or {}))
    return made if c.moment_dtype == "float32" else moments.rounded(made, c.moment_dtype, axes)


def _named(c: OptimizerConfig, schedule: optax.Schedule, axes: Any,
           by_width: list[optax.GradientTransformation]) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(c.weight_decay, map_names(is_matrix, axes))
    if c.name == "sgd":
        return optax.chain(*by_width, decay, optax.sgd(schedule, momentum=c.b1))
    scaled = {
        "adamw": lambda: optax.scale_by_adam(c.b1, c.b2, c.eps),
        "lion": lambda: optax.scale_by_lion(c.b1, c.b2),
        "adafactor": lambda: scale_by_adafactor(axes),
        "muon": lambda: scale_by_muon(c, axes),
    }[c.name]()
    # Decay is scaled by the learning rate, but not by width: what a step takes off a weight is the same in all widths.
    return optax.chain(scaled, *by_width, decay, optax.scale_by_learning_rate(schedule))


def global_norm(tree: Any) -> jax.Array:
    """Return the Euclidean norm over all leaves, in float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)))
