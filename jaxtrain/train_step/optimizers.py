"""Optimizers and schedules from optax, and which parameters decay."""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.schema import OptimizerConfig


def make_schedule(c: OptimizerConfig, steps: int) -> optax.Schedule:
    """A linear warm-up from 1/n of the peak, then the named decay; behind the last step it is at `final_fraction`."""
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
    """The optimizer, but where the tree `updates` names an update rule: that rule takes its place there.

    What its state looks like does not depend on `updates`: those of a part of a model are named as in the whole.
    """
    if not router_bias_rate:
        return optimizer
    rules: dict[Hashable, optax.GradientTransformation] = {
        name: make(router_bias_rate) for name, make in UPDATE_RULES.items()}
    return optax.partition(rules | {"": optimizer}, updates)


def _balance_load(rate: float) -> optax.GradientTransformation:
    """One step down for experts with more than an even share of the load, one up for those with less.

    The gradient of a router's bias is not a slope but its experts' excess of load (models/router.py).
    """
    def one(excess):
        # An excess of less than a millionth of a share is rounding.
        return jnp.where(jnp.abs(excess) < 1e-6, 0.0, -rate * jnp.sign(excess))
    return optax.stateless(lambda grads, params: jax.tree.map(one, grads))


# How a parameter changes whose metadata names a rule. Such gradients take no part in the gradient norm and clipping.
UPDATE_RULES = {"balance_load": _balance_load}


def make_optimizer(c: OptimizerConfig, schedule: optax.Schedule, axes: Any) -> optax.GradientTransformation:
    """The optimizer for parameters whose logical names are `axes` (a tree of tuples, as the parameters')."""
    decays = _map(is_matrix, axes)
    decay = dict(weight_decay=c.weight_decay, mask=decays)
    if c.name == "adamw":
        return optax.adamw(schedule, b1=c.b1, b2=c.b2, eps=c.eps, **decay)
    if c.name == "lion":
        return optax.lion(schedule, b1=c.b1, b2=c.b2, **decay)
    if c.name == "sgd":
        return optax.chain(optax.add_decayed_weights(c.weight_decay, decays), optax.sgd(schedule, momentum=c.b1))
    if c.name == "adafactor":
        # Like AdamW, decay is scaled by the learning rate; clipping is the step's own business.
        return optax.chain(
            optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0),
            optax.add_decayed_weights(c.weight_decay, decays), optax.scale_by_learning_rate(schedule))
    # Muon's own decay would leave out what is Adam's: embeddings and the head.
    update = optax.contrib.muon(
        -1.0, beta=c.b1, eps=c.eps, muon_weight_dimension_numbers=_map(_muon_dimensions, axes),
        adam_b1=c.b1, adam_b2=c.b2, consistent_rms=0.2)  # 0.2: update sizes as AdamW's, so one learning rate fits both
    decay = optax.add_decayed_weights(c.weight_decay, decays)
    return optax.chain(update, decay, optax.scale_by_learning_rate(schedule))


def is_matrix(names: tuple) -> bool:
    """Matrices decay; biases, norms and other vectors do not."""
    return "norm" not in names and sum(name not in (None, "layers", "head_dim") for name in names) > 1


def _muon_dimensions(names: tuple):
    """Hidden matrices are orthogonalised, heads flattened to one side; embeddings, head and vectors are Adam's."""
    if not is_matrix(names) or "vocab" in names or "positions" in names:
        return None
    kept = [i for i, name in enumerate(names) if name not in ("layers", "experts")]  # every expert by itself
    side = next(i for i in kept if names[i] in ("embed", "expert_embed", "rank"))
    other = tuple(i for i in kept if i != side)
    reduction, output = ((side,), other) if side == kept[0] else (other, (side,))
    return optax.contrib.MuonDimensionNumbers(reduction_axis=reduction, output_axis=output)


def _map(function, axes):
    return jax.tree.map(function, axes, is_leaf=lambda x: isinstance(x, tuple))


def global_norm(tree: Any) -> jax.Array:
    """The Euclidean norm over all leaves, in float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)))
