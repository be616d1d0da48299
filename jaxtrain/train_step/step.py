"""The train step as one pure function to compile: gradient, clipping, the guard against anomalies, the update."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from jaxtrain.base.annotations import PyTree
from jaxtrain.errors import UserError
from jaxtrain.sharding import mesh_context
from jaxtrain.train_step.gradients import LossSums, StateGradient
from jaxtrain.train_step.hooks import StepHooks, Verdict
from jaxtrain.train_step.optimizers import global_norm
from jaxtrain.train_step.precision import wide
from jaxtrain.train_step.settings import StepSettings
from jaxtrain.train_step.state import Layout, Metrics, Params, TrainState

Step = Callable[[TrainState, PyTree], tuple[TrainState, Metrics]]


def make_step(gradient: StateGradient, settings: StepSettings, layout: Layout, *, hooks: Sequence[StepHooks] = (),
              describe: Callable[[Any], dict[str, jax.Array]] = lambda sums: {}, updates: PyTree = None) -> Step:
    """Return the step to be jitted with its state donated.

    Args:
        gradient: from `make_gradient`, with what the hooks put around it.
        describe: makes metrics of the loss's further sums.
        updates: the name of the update rule of each trained parameter that has one of its own, else "".
    """
    clip_norm, schedule = settings.clip_norm, settings.schedule
    ruled = jax.tree.map(bool, updates if updates is not None else jax.tree.map(lambda _: "", layout.state.params))
    explicit = mesh_context.is_explicit(layout.mesh)

    def updating(optimizer, shardings):
        def update(params, opt_state, grads, factors, taken):
            def apply():
                # Clipped here, in the pass over the optimizer's state, not in one of its own.
                clipped = jax.tree.map(lambda g, f, p: (g.astype(wide(g)) * f).astype(p.dtype),
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

    update = next((made for hook in hooks if (made := hook.update(updating))), None) or updating(
        settings.optimizer, (layout.state.params, layout.state.opt_state))

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        return advance(state, *gradient(state, batch))

    @jax.named_scope("optimizer")  # where jaxtrain.bench looks for its time
    def advance(state: TrainState, sums: LossSums, grads: Params) -> tuple[TrainState, Metrics]:
        """Return the next state from gradients: norm, clipping, the judgement of anomalies, the update."""
        total, weight, further = sums
        scale = state.loss_scale.scale if state.loss_scale is not None else None
        params = state.params
        for hook in hooks:
            params, grads = hook.before_update(state, params, grads)
        leaves, treedef = jax.tree.flatten(grads)
        own_rule = treedef.flatten_up_to(ruled)
        norm = global_norm([g for g, own in zip(leaves, own_rule, strict=True) if not own])
        factor = jnp.where(norm > clip_norm, clip_norm / norm, 1.0) if clip_norm else 1.0
        factors = treedef.unflatten([1.0 if own else factor for own in own_rule])
        mean = total / jnp.maximum(weight, 1e-8)
        finite = jnp.isfinite(norm) & jnp.isfinite(mean)
        empty = weight <= 0  # no token counts: the parameters must not decay, nor the schedule advance
        taken, extras, judged = finite & ~empty, state.extras, {}
        for hook in hooks:
            taken, extras, more = hook.judge(Verdict(mean, norm, taken, empty, scale), extras)
            judged |= more
        if remembered := further.get("extras"):  # by the gradient, of a step that is taken
            old = {name: extras[name] for name in remembered}
            extras = extras | jax.tree.map(lambda new, old: jnp.where(taken, new, old), remembered, old)
        params, opt_state = update(params, state.opt_state, grads, factors, taken)
        for hook in hooks:
            params, extras = hook.after_update(params, extras, taken, state.step)
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
        metrics |= own | further.get("of_hooks", {})  # what those around the gradient measured
        return TrainState(state.step + 1, params, opt_state, skipped, loss_scale, extras, state.frozen), metrics

    return step
