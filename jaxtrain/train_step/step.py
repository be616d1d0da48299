"""The train step as one pure function to compile: gradient, clipping, the guard against anomalies, the update."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from jaxtrain.errors import UserError
from jaxtrain.sharding import rules as sharding
from jaxtrain.train_step.gradients import StateGradient
from jaxtrain.train_step.offload import by_pieces
from jaxtrain.train_step.optimizers import ema, global_norm
from jaxtrain.train_step.optimizers.structured_sparsity import Sparsity
from jaxtrain.train_step.state import Layout, TrainState

Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]


def make_step(gradient: StateGradient, optimizer: optax.GradientTransformation, layout: Layout, *,
              clip_norm: float = 0.0, schedule: optax.Schedule | None = None,
              describe: Callable[[Any], dict[str, jax.Array]] = lambda sums: {}, spike_z: float = 0.0,
              skip_spikes: bool = False, ema_decay: float = 0.0, updates: Any = None,
              optimizer_of: Callable[[Any, Any], optax.GradientTransformation] | None = None,
              sparsity: Sparsity | None = None) -> Step:
    """Return the step to be jitted with its state donated.

    Args:
        gradient: from `make_gradient`.
        describe: makes metrics of the loss's further sums.
        spike_z: how many standard deviations above the recent history of its state a step is a spike.
        skip_spikes: leave out the updates of spikes.
        ema_decay: of the moving average of the parameters, where the state has one.
        updates: the name of the update rule of each trained parameter that has one of its own, else "".
        optimizer_of: makes the optimizer of parameters with given logical names and update rules: for a layout that
            keeps its state in the hosts' memory.
        sparsity: which kernels become sparse.
    """
    ruled = jax.tree.map(bool, updates if updates is not None else jax.tree.map(lambda _: "", layout.state.params))
    explicit = sharding.is_explicit(layout.mesh)

    def updating(optimizer, shardings):
        def update(params, opt_state, grads, factors, taken):
            def apply():
                # Clipped here, in the pass over the optimizer's state, not in one of its own.
                clipped = jax.tree.map(lambda g, f, p: (g.astype(jnp.float32) * f).astype(p.dtype),
                                       grads, factors, params)
                # Under ZeRO each device updates the piece whose moments it holds; then it is laid out as at rest.
                updates, new_state = optimizer.update(clipped, opt_state, params)
                return optax.apply_updates(params, updates), new_state
            if layout.layerwise:  # of several branches XLA would make one, which wants all of the state at once
                return jax.tree.map(lambda new, old: jnp.where(taken, new, old), apply(), (params, opt_state))
            return jax.lax.cond(taken, apply, lambda: (params, opt_state))

        if not explicit:
            return update
        # Any optax transformation must work, so here the compiler finds the shardings of what lies between.
        return cast(Any, jax.sharding.auto_axes(update, out_sharding=jax.tree.map(lambda s: s.spec, shardings)))

    if layout.layerwise:
        assert optimizer_of, "a layout by layers needs an optimizer for its pieces"
        update = by_pieces(layout, updates, optimizer_of, updating)
    else:
        update = updating(optimizer, (layout.state.params, layout.state.opt_state))

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        return advance(state, *gradient(state, batch))

    @jax.named_scope("optimizer")  # where jaxtrain.bench looks for its time
    def advance(state: TrainState, sums: tuple[Any, ...], grads: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Return the next state from gradients: norm, clipping, the judgement of anomalies, the update."""
        total, weight, further = sums
        scale = state.loss_scale.scale if state.loss_scale is not None else None
        whole = state.params
        if sparsity is not None:
            whole, grads = sparsity.dense(whole, state.extras), sparsity.gradient(grads, state.extras)
        leaves, treedef = jax.tree.flatten(grads)
        own_rule = treedef.flatten_up_to(ruled)
        norm = global_norm([g for g, own in zip(leaves, own_rule, strict=True) if not own])
        factor = jnp.where(norm > clip_norm, clip_norm / norm, 1.0) if clip_norm else 1.0
        factors = treedef.unflatten([1.0 if own else factor for own in own_rule])
        mean = total / jnp.maximum(weight, 1e-8)
        finite = jnp.isfinite(norm) & jnp.isfinite(mean)
        empty = weight <= 0  # no token counts: the parameters must not decay, nor the schedule advance
        taken, extras, judged = finite & ~empty, state.extras, {}
        if "history" in extras:
            overflow = False if scale is None else jnp.isfinite(mean) & ~jnp.isfinite(norm) & (scale > 1)
            taken, history, judged = extras["history"].judge(mean, norm, taken, overflow | empty, spike_z, skip_spikes)
            extras = extras | {"history": history}
        if remembered := further.get("extras"):  # by the gradient, of a step that is taken
            old = {name: extras[name] for name in remembered}
            extras = extras | jax.tree.map(lambda new, old: jnp.where(taken, new, old), remembered, old)
        params, opt_state = update(whole, state.opt_state, grads, factors, taken)
        if sparsity is not None:
            params, extras = sparsity.sparse(params, extras, state.step + 1)
        if ema.NAME in extras:
            extras = extras | {ema.NAME: ema.updated(extras[ema.NAME], params, ema_decay, taken)}
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
