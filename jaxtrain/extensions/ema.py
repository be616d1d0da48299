"""The exponential moving average of the trained parameters (`train.ema_decay`), an entry of a state's `extras`.

It begins at the initial parameters, so that no bias has to be corrected. It is at least as exact as float32: with a
decay near 1 a step adds less than fewer bits can hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.base.annotations import PyTree
from jaxtrain.run import Extension, Parts
from jaxtrain.train_step.state import AVERAGE as NAME
from jaxtrain.train_step.state import Extras, Params, TrainState


@dataclass(frozen=True)
class AveragedParameters(Extension):
    """The average, updated after each step that is taken, and evaluated beside the parameters."""

    decay: float
    state_words: ClassVar[str] = "averaged parameters"

    @classmethod
    def of(cls, parts: Parts) -> "AveragedParameters":
        """Return it with the decay of the config."""
        return cls(parts.config.train.ema_decay)

    def extra_state(self) -> Extras:
        """Return the average at step 0."""
        return {NAME: begin}

    def after_update(self, params: Params, extras: dict[str, PyTree], taken: jax.Array,
                     step: jax.Array) -> tuple[Params, dict[str, PyTree]]:
        """Return the same parameters, and the extras with their average."""
        return params, extras | {NAME: updated(extras[NAME], params, self.decay, taken)}

    def evaluated(self, state: TrainState) -> Mapping[str, TrainState]:
        """Return the state with the average, where it has one."""
        return {"eval_loss_ema": state.averaged} if NAME in state.extras else {}


def begin(params: Params) -> Params:
    """Return the average as it begins: a copy of the parameters, whose memory a step reuses."""
    return jax.tree.map(lambda p: jnp.copy(p.astype(jnp.promote_types(p.dtype, jnp.float32))), params)


def updated(average: Params, params: Params, decay: float, taken: jax.Array) -> Params:
    """Return decay x average + (1 - decay) x params, or the same average where the step was not taken."""
    share = jnp.where(taken, 1 - decay, 0)

    def one(a, p):
        return a + share.astype(a.dtype) * (p.astype(a.dtype) - a)
    return jax.tree.map(one, average, params)
