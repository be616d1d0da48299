"""Is this step like those before it? Answered on the device, so that every process, mesh and restart answers alike.

The state keeps the loss and gradient norm of the last `SIZE` steps. How far a new one lies above their median is told
in robust standard deviations (of the median absolute deviation), which a few spikes among them do not widen.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

SIZE = 128
ENOUGH = 32  # values to compare with: before there are so many nothing is a spike
NORMAL = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
LEAST = 1e-3  # of the median: a spread below it says that values hardly vary, not that small steps are spikes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class History:
    """What recent steps were like. S: the last SIZE of them, in a ring."""

    values_2S: Any  # loss, gradient norm
    seen: Any  # values that were ever put in
    rejected: Any  # steps in a row, up to the last one, whose update was left out

    @classmethod
    def empty(cls) -> "History":
        """Zeros: what a checkpoint that knows of no history is completed with."""
        zero = jnp.zeros((), jnp.int32)
        return cls(jnp.zeros((2, SIZE), jnp.float32), zero, zero)

    def z_scores(self, loss: jax.Array, norm: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of loss and gradient norm, in robust standard deviations above the median; 0 while too few are known."""
        count = jnp.minimum(self.seen, SIZE)
        there_S = jnp.arange(SIZE) < count

        def median(values_2S):  # what is not there is sorted behind what is
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
        """-> whether to take the step, the history behind it, and metrics.

        Args:
            overflow: of gradients in float16, which is how its loss scale is found and no anomaly.
            skip: leave out the updates of spikes too, not only of what is not finite.
        """
        loss_z, norm_z = self.z_scores(loss, norm)
        spike = finite & (jnp.maximum(loss_z, norm_z) > spike_z)
        taken = finite & ~spike if skip else finite
        here_S = (jnp.arange(SIZE) == self.seen % SIZE) & taken
        new_2 = jnp.stack([loss, norm]).astype(jnp.float32)
        rejected = jnp.where(taken | overflow, 0, self.rejected + 1)
        after = History(jnp.where(here_S, new_2[:, None], self.values_2S), self.seen + taken, rejected)
        return taken, after, {"loss_z": loss_z, "grad_norm_z": norm_z, "spike": spike, "skipped_in_a_row": rejected}
