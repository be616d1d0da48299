"""Loss -> gradients -> update, as one pure function to compile: accumulation, clipping, the guard against anomalies."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from jaxtrain.errors import UserError
from jaxtrain.sharding import rules as sharding
from jaxtrain.train_step import partition
from jaxtrain.train_step import precision as precisions
from jaxtrain.train_step.offload import by_pieces
from jaxtrain.train_step.optimizers import global_norm
from jaxtrain.train_step.state import Layout, TrainState

# A loss is a sum, the weight to divide it by, so that micro-batches of unequal weight add up to the whole batch, and a
# dict of further sums, for metrics.
WeightedLoss = Callable[..., tuple[jax.Array, jax.Array, dict[str, Any]]]
# Trained and frozen parameters as they compute, batch, scale -> what a loss returns, and the gradient of the mean loss
# with respect to the trained ones, times the scale.
Gradient = Callable[[Any, Any, Any, Any], tuple[tuple[Any, ...], Any]]
Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]


def make_step(loss: WeightedLoss, optimizer: optax.GradientTransformation, layout: Layout, *, accumulation: int = 1,
              clip_norm: float = 0.0, precision: str = "float32", schedule: optax.Schedule | None = None,
              differentiate: Gradient | None = None,
              describe: Callable[[Any], dict[str, jax.Array]] = lambda sums: {}, spike_z: float = 0.0,
              skip_spikes: bool = False, updates: Any = None, dtypes: Any = None,
              optimizer_of: Callable[[Any, Any], optax.GradientTransformation] | None = None,
              seed: int | None = None) -> Step:
    """Return the step to be jitted with its state donated.

    Args:
        loss: takes trained and frozen parameters as one tree, and a batch.
        differentiate: takes the place of `jax.grad` of the loss.
        describe: makes metrics of the loss's further sums.
        spike_z: how many standard deviations above the recent history of its state a step is a spike.
        skip_spikes: leave out the updates of spikes.
        updates: the name of the update rule of each trained parameter that has one of its own, else "".
        dtypes: the dtype in which each parameter computes if it is not that of `precision`, else ""; a tree of trained
            and frozen parameters.
        optimizer_of: makes the optimizer of parameters with given logical names and update rules: for a layout that
            keeps its state in the hosts' memory.
        seed: the loss takes a key besides, which follows from it, the step and the micro-batch.
    """
    ruled = jax.tree.map(bool, updates if updates is not None else jax.tree.map(lambda _: "", layout.state.params))
    explicit = sharding.is_explicit(layout.mesh)

    def place(tree, shardings):
        move = jax.reshard if explicit else jax.lax.with_sharding_constraint
        return jax.tree.map(lambda x, s: move(x, s.spec if explicit else s), tree, shardings)

    def computing(params, like):
        return precisions.cast(params, precision, None if dtypes is None else partition.like(dtypes, like))

    def gradient(params, frozen, batch, scale, *key):
        """Of the mean loss of one micro-batch, times `scale`."""
        frozen = computing(frozen, frozen)
        if differentiate is not None:
            sums, grads = differentiate(computing(params, params), frozen, batch, 1.0 if scale is None else scale)
            return sums, place(grads, layout.gradients)

        def scaled(params):
            total, weight, sums = loss(partition.merge(computing(params, params), frozen), batch, *key)
            mean = total / jnp.maximum(weight, 1e-8)
            return mean if scale is None else mean * scale, (total, weight, sums)
        grads, sums = jax.grad(scaled, has_aux=True)(params)
        return sums, place(grads, layout.gradients)

    def accumulate(params, frozen, batch, scale, *key):
        def add(carry, micro):
            batch, *number = micro
            sums, grads = gradient(params, frozen, batch, scale, *map(jax.random.fold_in, key, number))
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) * sums[1], grads)
            return jax.tree.map(jnp.add, carry, (sums, grads)), None

        zeros = place(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params), layout.gradients)
        micro_batches = jax.tree.map(lambda x: sharding.micro_batches(x, accumulation), batch)
        first = jax.tree.map(lambda x: x[0], micro_batches)
        sums = jax.eval_shape(lambda: gradient(params, frozen, first, scale, *key)[0])
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
        each = (micro_batches, *(jnp.arange(accumulation) for _ in key))
        (sums, grads), _ = jax.lax.scan(add, (none, zeros), each)
        return sums, jax.tree.map(lambda g: g / jnp.maximum(sums[1], 1e-8), grads)

    def updating(optimizer, shardings):
        def update(params, opt_state, grads, taken):
            def apply():
                # Under ZeRO each device updates the piece whose moments it holds; then it is laid out as at rest.
                updates, new_state = optimizer.update(grads, opt_state, params)
                return optax.apply_updates(params, updates), new_state
            if layout.offloads:  # of several branches XLA would make one, which wants all of the state at once
                return jax.tree.map(lambda new, old: jnp.where(taken, new, old), apply(), (params, opt_state))
            return jax.lax.cond(taken, apply, lambda: (params, opt_state))

        if not explicit:
            return update
        # Any optax transformation must work, so here the compiler finds the shardings of what lies between.
        return cast(Any, jax.sharding.auto_axes(update, out_sharding=jax.tree.map(lambda s: s.spec, shardings)))

    if layout.offloads:
        assert optimizer_of, "an offloaded layout needs an optimizer for its pieces"
        update = by_pieces(layout, updates, optimizer_of, updating)
    else:
        update = updating(optimizer, (layout.state.params, layout.state.opt_state))

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        scale = state.loss_scale.scale if state.loss_scale is not None else None
        compute = gradient if accumulation == 1 else accumulate
        key = () if seed is None else (jax.random.fold_in(jax.random.key(seed), state.step),)
        return advance(state, *compute(state.params, state.frozen, batch, scale, *key), scale)

    @jax.named_scope("optimizer")  # where jaxtrain.bench looks for its time
    def advance(state: TrainState, sums: tuple[Any, ...], grads: Any,
                scale: jax.Array | None) -> tuple[TrainState, dict[str, jax.Array]]:
        """From gradients to the next state: norm, clipping, the judgement of anomalies, the update."""
        total, weight, further = sums
        if scale is not None:
            grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        leaves, treedef = jax.tree.flatten(grads)
        own_rule = treedef.flatten_up_to(ruled)
        norm = global_norm([g for g, own in zip(leaves, own_rule, strict=True) if not own])
        if clip_norm:
            factor = jnp.where(norm > clip_norm, clip_norm / norm, 1.0)
            grads = treedef.unflatten([g if own else (g * factor).astype(g.dtype)
                                       for g, own in zip(leaves, own_rule, strict=True)])
        mean = total / jnp.maximum(weight, 1e-8)
        finite = jnp.isfinite(norm) & jnp.isfinite(mean)
        empty = weight <= 0  # no token counts: the parameters must not decay, nor the schedule advance
        taken, extras, judged = finite & ~empty, state.extras, {}
        if "history" in extras:
            overflow = False if scale is None else jnp.isfinite(mean) & ~jnp.isfinite(norm) & (scale > 1)
            taken, history, judged = extras["history"].judge(mean, norm, taken, overflow | empty, spike_z, skip_spikes)
            extras = extras | {"history": history}
        params, opt_state = update(state.params, state.opt_state, grads, taken)
        skipped = state.skipped + ~taken
        metrics = {"loss": mean, "grad_norm": norm, "skipped": skipped, **judged}
        if schedule is not None:
            metrics["learning_rate"] = jnp.asarray(schedule(state.step - state.skipped), jnp.float32)
        loss_scale = state.loss_scale and state.loss_scale.update(finite)
        if loss_scale is not None:
            metrics["loss_scale"] = loss_scale.scale
        own = describe(further)
        if twice := sorted(metrics.keys() & own.keys()):
            raise UserError("metrics", f"the step has a metric {twice[0]!r} of its own", "give the loss's another name")
        metrics |= own
        return TrainState(state.step + 1, params, opt_state, skipped, loss_scale, extras, state.frozen), metrics

    return step
