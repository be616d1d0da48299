"""The hooks of a train step: what adds to its state, its gradient and its update. Each does nothing by default."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from jaxtrain.base.annotations import PyTree
from jaxtrain.sharding.axis_rules import Shardings
from jaxtrain.train_step.gradients import StateGradient
from jaxtrain.train_step.state import Extras, Layout, Metrics, Params, TrainState

# (parameters, their state, gradients, a factor for each, whether to take the step) -> new parameters and state.
Update = Callable[[Params, PyTree, Params, PyTree, jax.Array], tuple[Params, PyTree]]
# An optimizer and the shardings of its parameters and their state -> the update.
MakeUpdate = Callable[[optax.GradientTransformation, Shardings], Update]


@dataclass(frozen=True)
class Verdict:
    """The judgement of a step before its update: whether it is to be taken, and why not."""

    loss: jax.Array
    grad_norm: jax.Array
    taken: jax.Array  # False: its numbers are not finite, no token counts, or another hook has refused it
    empty: jax.Array  # no token counts
    scale: jax.Array | None  # of the loss, in float16

    @property
    def excused(self) -> jax.Array:
        """Whether the step is left out for a reason that is no anomaly: an overflow in float16, or an empty batch."""
        overflow = False if self.scale is None else (
            jnp.isfinite(self.loss) & ~jnp.isfinite(self.grad_norm) & (self.scale > 1))
        return overflow | self.empty


class StepHooks:
    """The hooks that are traced with a step, in the order in which it calls them."""

    def extra_state(self) -> Extras:
        """Return by name what makes each further entry of the state's `extras` from the trained parameters."""
        return {}

    def extra_shardings(self, layout: Layout) -> Mapping[str, Shardings]:
        """Return the shardings of these entries, where they are not those of parameters, or of small replicated arrays.
        """
        return {}

    def around_gradient(self, gradient: StateGradient) -> StateGradient:
        """Return the gradient of the step, made of the one that it has without this.

        What the sums of its loss have as "extras" becomes those entries of the state, if the step is taken; what they
        have as "of_hooks" are metrics of the step.
        """
        return gradient

    def before_update(self, state: TrainState, params: Params, grads: Params) -> tuple[Params, Params]:
        """Return the parameters and gradients that the update is made of."""
        return params, grads

    def judge(self, verdict: Verdict, extras: dict[str, PyTree]) -> tuple[jax.Array, dict[str, PyTree], Metrics]:
        """Return whether to take the step, the extras, and metrics."""
        return verdict.taken, extras, {}

    def update(self, make: MakeUpdate) -> Update | None:
        """Return the update in place of the one that the optimizer makes of all parameters at once."""
        return None

    def after_update(self, params: Params, extras: dict[str, PyTree], taken: jax.Array,
                     step: jax.Array) -> tuple[Params, dict[str, PyTree]]:
        """Return the parameters and the extras of the next state. `step`: the steps made before this one."""
        return params, extras


def extras_of(hooks: Iterable[StepHooks]) -> Extras:
    """Return by name what makes each entry of a state's `extras`."""
    return {name: make for hook in hooks for name, make in hook.extra_state().items()}
