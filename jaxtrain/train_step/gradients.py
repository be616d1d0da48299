"""The gradient of a batch from a loss and a state: compute dtypes, loss scaling, gradient accumulation.

Where gradients are averaged over devices: nowhere by an explicit all-reduce. The loss is a sum over the whole batch,
divided by its weight, so XLA adds the all-reduce, or reduce-scatter, of the mean gradient over the axes that shard the
batch. Only `compression` (extensions/compression.py) and `mesh=hsdp` sum gradients in code of their own.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.base import further_sums
from jaxtrain.base.annotations import PyTree
from jaxtrain.sharding import activations, axis_rules, mesh_context
from jaxtrain.train_step import partition
from jaxtrain.train_step import precision as precisions
from jaxtrain.train_step.state import Layout, Params, TrainState

# A loss is a sum, the weight to divide it by, so that micro-batches of unequal weight add up to the whole batch, and a
# dict of further sums, for metrics.
WeightedLoss = Callable[..., tuple[jax.Array, jax.Array, dict[str, Any]]]
LossSums = tuple[Any, ...]  # what a loss returns, at times without the further sums
# Trained and frozen parameters as they compute, batch, scale -> what a loss returns, and the gradient of the mean loss
# with respect to the trained ones, times the scale.
Gradient = Callable[[Params, Params, PyTree, jax.Array | float], tuple[LossSums, Params]]
# What a loss returns for a batch, and the gradient of the mean loss with respect to the state's trained parameters, in
# the dtype that they compute in, or in float32.
StateGradient = Callable[[TrainState, PyTree], tuple[LossSums, Params]]


def make_gradient(loss: WeightedLoss, layout: Layout, *, accumulation: int = 1, precision: str = "float32",
                  differentiate: Gradient | None = None, dtypes: PyTree = None,
                  seed: int | None = None) -> StateGradient:
    """Return the function from a state and a batch to the loss's sums and the gradient of the mean loss.

    Args:
        loss: takes trained and frozen parameters as one tree, and a batch.
        differentiate: takes the place of `jax.grad` of the loss.
        dtypes: the dtype in which each parameter computes if it is not that of `precision`, else ""; a tree of trained
            and frozen parameters.
        seed: the loss takes a key besides, which follows from it, the step and the micro-batch.
    """
    explicit = mesh_context.is_explicit(layout.mesh)

    def place(tree, shardings):
        if not explicit:
            return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)
        mesh = jax.sharding.get_abstract_mesh()  # of which an axis may be manual, over which others sum
        return jax.tree.map(lambda x, s: jax.reshard(x, axis_rules.without_trivial_axes(s.spec, mesh)), tree, shardings)

    def computing(params, like):
        return precisions.cast(params, precision, None if dtypes is None else partition.like(dtypes, like))

    def gradient(params, frozen, batch, scale, *key):
        """Return the gradient of the mean loss of one micro-batch, times `scale`."""
        frozen = computing(frozen, frozen)
        if differentiate is not None:
            sums, grads = differentiate(computing(params, params), frozen, batch, 1.0 if scale is None else scale)
            return sums, place(grads, layout.gradients)

        def scaled(params):
            total, weight, sums = loss(partition.merge(params, frozen), batch, *key)
            mean = total / jnp.maximum(weight, 1e-8)
            return mean if scale is None else mean * scale, (total, weight, sums)
        grads, sums = jax.grad(scaled, has_aux=True)(computing(params, params))
        return sums, place(grads, layout.gradients)

    def accumulate(params, frozen, batch, scale, *key):
        def add(carry, micro):
            batch, *number = micro
            # Where they lie is said again, or XLA would gather arrays outside of the loop, for all micro-batches.
            here = place(params, layout.state.params), place(frozen, layout.state.frozen)
            sums, grads = gradient(*here, batch, scale, *map(jax.random.fold_in, key, number))
            grads = jax.tree.map(lambda g: g.astype(precisions.wide(g)) * sums[1], grads)
            sums = further_sums.by_kind(jnp.add, jnp.maximum, carry[0], sums)
            return (sums, jax.tree.map(jnp.add, carry[1], grads)), None

        zeros = place(jax.tree.map(lambda p: jnp.zeros(p.shape, precisions.wide(p)), params), layout.gradients)
        # Cast once, and not for each micro-batch.
        params, frozen = computing(params, params), computing(frozen, frozen)
        micro_batches = jax.tree.map(lambda x: activations.micro_batches(x, accumulation), batch)
        first = jax.tree.map(lambda x: x[0], micro_batches)
        sums = jax.eval_shape(lambda: gradient(params, frozen, first, scale, *key)[0])
        none = further_sums.none_of(sums)
        each = (micro_batches, *(jnp.arange(accumulation) for _ in key))
        (sums, grads), _ = jax.lax.scan(add, (none, zeros), each)
        return sums, jax.tree.map(lambda g: g / jnp.maximum(sums[1], 1e-8), grads)

    def of_state(state: TrainState, batch: PyTree) -> tuple[LossSums, Params]:
        scale = state.loss_scale.scale if state.loss_scale is not None else None
        key = () if seed is None else (jax.random.fold_in(jax.random.key(seed), state.step),)
        compute = gradient if accumulation == 1 else accumulate
        sums, grads = compute(state.params, state.frozen, batch, scale, *key)
        if scale is not None:
            with jax.named_scope("optimizer"):
                grads = jax.tree.map(lambda g: g.astype(precisions.wide(g)) / scale, grads)
        return sums, grads

    return of_state
