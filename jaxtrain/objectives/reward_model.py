"""Reward models: a scalar for an answer that is higher for the chosen one of a pair (Bradley-Terry).

The reward is read out at the last token that predicts a token of the answer: the one before its end, which is the same
token for all answers.

Shape suffixes: B rows, T tokens, S segments of a row, P pairs of a row.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.config.sections.tuning_keys import PreferenceConfig
from jaxtrain.objectives.preference import METRICS, Preference
from jaxtrain.objectives.reference_policy import Segments, summed_over_rows
from jaxtrain.train_step.state import Batch, Params


@dataclass(frozen=True, kw_only=True)
class RewardModel(Preference):
    """The mean over pairs of -log sigmoid of how much higher the chosen answer's reward is than the rejected one's."""

    def end(self, params: Params, x_BTD: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss and the metrics, summed over pairs."""
        model = self.model.merge(params)
        arrays = {key: batch[key] for key in ("answers", "segments", "positions")}
        rewards_BT = model.reward_head(model.finish(x_BTD))
        return summed_over_rows(partial(_of_rows, self.settings), arrays | {"rewards": rewards_BT})


def _of_rows(c: PreferenceConfig, batch: Batch, segments: Segments) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return one device's share of the loss and the metrics, summed over the pairs of its rows."""
    last_BT = segments.last(batch["answers"] > 0, batch["positions"])
    there_BS = segments.sums(last_BT.astype(jnp.float32)) > 0
    rewards_BS = segments.sums(jnp.where(last_BT, batch["rewards"], 0))
    chosen, rejected = rewards_BS[:, 1::2], rewards_BS[:, 2::2]
    loss_BP = jax.nn.softplus(c.margin - (chosen - rejected)) + c.center * jnp.square(chosen + rejected)
    measured = (chosen > rejected).astype(jnp.float32), chosen - rejected, chosen, rejected
    found = {"loss": loss_BP, **lax.stop_gradient(dict(zip(METRICS, measured, strict=False)))}
    there_BP = there_BS[:, 1::2] & there_BS[:, 2::2]
    sums = {name: jnp.where(there_BP, x_BP, 0).sum() / segments.devices for name, x_BP in found.items()}
    return sums.pop("loss"), sums
