"""Detect anomalous steps on the device, with the same answer on every process, mesh and restart.

The state keeps the loss and gradient norm of the last `SIZE` steps. A new value's distance above their median is
measured in robust standard deviations (from the median absolute deviation), which a few spikes do not widen.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtrain.base.annotations import AnyArray, PyTree
from jaxtrain.run import Extension, Parts
from jaxtrain.train_step.hooks import Verdict
from jaxtrain.train_step.state import Extras, Metrics

NAME = "history"  # in a state's extras
SIZE = 128
ENOUGH = 32  # values to compare with; with fewer, no step counts as a spike
NORMAL = 1.4826  # ratio of standard deviation to median absolute deviation in a normal distribution
LEAST = 1e-3  # of the median: the smallest spread, so that small changes of nearly constant values are not spikes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class History:
    """The loss and gradient norm of recent steps; S: the last SIZE of them, in a ring buffer."""

    values_2S: AnyArray  # loss, gradient norm
    seen: AnyArray  # number of values ever stored
    rejected: AnyArray  # consecutive steps, up to the last one, whose update was skipped

    @classmethod
    def empty(cls) -> "History":
        """Return zeros, also used for a checkpoint without a history."""
        zero = jnp.zeros((), jnp.int32)
        return cls(jnp.zeros((2, SIZE), jnp.float32), zero, zero)

    def z_scores(self, loss: jax.Array, norm: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the z-scores of loss and gradient norm, in robust standard deviations; 0 while too few are known."""
        count = jnp.minimum(self.seen, SIZE)
        there_S = jnp.arange(SIZE) < count

        def median(values_2S):  # missing values sort last
            sorted_2S = jnp.sort(jnp.where(there_S, values_2S, jnp.inf), axis=1)
            low, high = (count - 1) // 2, count // 2
            middle_S = (jnp.arange(SIZE) == low) | (jnp.arange(SIZE) == high)
            return jnp.where(middle_S, sorted_2S, 0).sum(1) / (1 + (low < high))

        middle_2 = median(self.values_2S)
        spread_2 = NORMAL * median(jnp.abs(self.values_2S - middle_2[:, None]))
        spread_2 = jnp.maximum(spread_2, LEAST * jnp.abs(middle_2) + jnp.finfo(jnp.float32).tiny)
        z_2 = (jnp.stack([loss, norm]).astype(jnp.float32) - middle_2) / spread_2
        loss_z, norm_z = jnp.where(count >= ENOUGH, z_2, 0)
        return loss_z, norm_z

    def judge(self, loss: jax.Array, norm: jax.Array, finite: jax.Array, overflow: jax.Array | bool, spike_z: float,
              skip: bool) -> tuple[jax.Array, "History", dict[str, jax.Array]]:
        """Return whether to take the step, the new history, and metrics.

        Args:
            finite: whether the step may be taken.
            overflow: of gradients in float16, by which the loss scale adapts, or an empty batch; not an anomaly.
            skip: skip the updates of spikes too, not only of what is not finite.
        """
        loss_z, norm_z = self.z_scores(loss, norm)
        spike = finite & (jnp.maximum(loss_z, norm_z) > spike_z)
        taken = finite & ~spike if skip else finite
        here_S = (jnp.arange(SIZE) == self.seen % SIZE) & taken
        new_2 = jnp.stack([loss, norm]).astype(jnp.float32)
        rejected = jnp.where(taken | overflow, 0, self.rejected + 1)
        after = History(jnp.where(here_S, new_2[:, None], self.values_2S), self.seen + taken, rejected)
        return taken, after, {"loss_z": loss_z, "grad_norm_z": norm_z, "spike": spike, "skipped_in_a_row": rejected}


@dataclass(frozen=True)
class AnomalyHistory(Extension):
    """The judgement of steps by `resilience.spike_z`; every run has it."""

    spike_z: float
    skip: bool  # leave out the updates of spikes

    @classmethod
    def of(cls, parts: Parts) -> "AnomalyHistory":
        """Return it with the limits of the config."""
        limits = parts.config.resilience
        return cls(limits.spike_z, limits.spikes != "record")

    def extra_state(self) -> Extras:
        """Return an empty history."""
        return {NAME: lambda params: History.empty()}

    def judge(self, verdict: Verdict, extras: dict[str, PyTree]) -> tuple[jax.Array, dict[str, PyTree], Metrics]:
        """Return whether to take the step, the extras with the next history, and the z-scores."""
        taken, history, metrics = extras[NAME].judge(verdict.loss, verdict.grad_norm, verdict.taken, verdict.excused,
                                                     self.spike_z, self.skip)
        return taken, extras | {NAME: history}, metrics
