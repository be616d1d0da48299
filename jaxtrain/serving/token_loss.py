"""The losses of the Tinker API: sums over tokens of what each token's log-probability gives, and its inputs.

The formulas are those of https://tinker-docs.thinkingmachines.ai/tinker/losses; GSPO's is that of arXiv 2507.18071 in
its per-token form, with the ratio of a whole datum.

Shape suffixes: B data, one a row, T tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.schema import DataConfig, TrainConfig
from jaxtrain.data.loading.batch_spec import Declared
from jaxtrain.kernels.loss_head.token_cross_entropy import token_cross_entropy
from jaxtrain.objectives.next_token import NextToken
from jaxtrain.objectives.objective import of_sections
from jaxtrain.parallel.pipeline.parts import Parts
from jaxtrain.train_step.state import Batch, Params, Skeleton

Loss = Callable[[jax.Array, Batch], jax.Array]  # log-probabilities and a batch -> the loss of each token


@dataclass(frozen=True)
class LossFunction:
    """A loss of the API: what it computes, and what it reads."""

    of: Loss
    inputs: tuple[str, ...] = ()  # of each datum, beside target_tokens and weights
    # Numbers of loss_fn_config, with the value of those that are left out. A datum may have one for each token instead.
    numbers: Mapping[str, float] = field(default_factory=dict)
    needs_weights: bool = False  # each datum says what its tokens weigh; otherwise each weighs 1 unless it says so


def _cross_entropy(logp_BT: jax.Array, batch: Batch) -> jax.Array:
    return -logp_BT


def _ratio(logp_BT: jax.Array, batch: Batch) -> jax.Array:
    return jnp.exp(logp_BT - batch["logprobs"])


def _clipped(ratio_BT: jax.Array, batch: Batch) -> jax.Array:
    return jnp.clip(ratio_BT, batch["clip_low_threshold"], batch["clip_high_threshold"])


def _importance_sampling(logp_BT: jax.Array, batch: Batch) -> jax.Array:
    return -_ratio(logp_BT, batch) * batch["advantages"]


def _surrogate(ratio_BT: jax.Array, batch: Batch) -> jax.Array:
    return -jnp.minimum(ratio_BT * batch["advantages"], _clipped(ratio_BT, batch) * batch["advantages"])


def _ppo(logp_BT: jax.Array, batch: Batch) -> jax.Array:
    return _surrogate(_ratio(logp_BT, batch), batch)


def _cispo(logp_BT: jax.Array, batch: Batch) -> jax.Array:
    return -lax.stop_gradient(_clipped(_ratio(logp_BT, batch), batch)) * logp_BT * batch["advantages"]


def _dro(logp_BT: jax.Array, batch: Batch) -> jax.Array:
    return -(logp_BT * batch["advantages"] - batch["beta"] / 2 * jnp.square(logp_BT - batch["logprobs"]))


def _gspo(logp_BT: jax.Array, batch: Batch) -> jax.Array:
    counted_BT = batch["sequence_ratio_mask"]
    log_ratio_B1 = ((logp_BT - batch["logprobs"]) * counted_BT).sum(1, keepdims=True)
    ratio_B1 = jnp.exp(log_ratio_B1 / jnp.maximum(counted_BT.sum(1, keepdims=True), 1))
    return _surrogate(jnp.broadcast_to(ratio_B1, logp_BT.shape), batch)


_POLICY = ("logprobs", "advantages")
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": LossFunction(_cross_entropy, needs_weights=True),
    "importance_sampling": LossFunction(_importance_sampling, _POLICY),
    "ppo": LossFunction(_ppo, _POLICY, _CLIPS),
    "cispo": LossFunction(_cispo, _POLICY, _CLIPS),
    "dro": LossFunction(_dro, _POLICY, {"beta": 0.05}),
    "gspo": LossFunction(_gspo, (*_POLICY, "sequence_ratio_mask"),
                         {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}),
}


@dataclass(frozen=True)
class TokenLoss(NextToken):
    """The objective of one of these losses: a sum, which nothing divides, and each token's log-probability."""

    loss_fn: str = "cross_entropy"

    @of_sections
    @classmethod
    def of(cls, skeleton: Skeleton, *, model: ModelConfig, train: TrainConfig, data: DataConfig) -> "TokenLoss":
        """Return the objective without the penalties that training by a config adds."""
        made = cast(TokenLoss, super().of(skeleton, model=model, train=train, data=data))
        return replace(made, z_loss=0.0, mtp_loss_weight=0.0, penalties=False)

    @property
    def batch_spec(self) -> Declared:
        """The arrays of next-token prediction, and what the loss reads of each token."""
        loss = LOSSES[self.loss_fn]
        return {**super().batch_spec, **dict.fromkeys((*loss.inputs, *loss.numbers), np.float32)}

    @property
    def pipeline_parts(self) -> Parts:
        """The parts of next-token prediction, but that the sum is divided by 1."""
        return replace(super().pipeline_parts, weight=lambda batch: jnp.ones((), jnp.float32))

    def end(self, params: Params, x_BTD: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The summed loss; each token's log-probability, and its place in the row, which devices may have cut."""
        model = self.model.merge(params)
        logp_BT = -token_cross_entropy(model.finish(x_BTD), model.head(), batch["targets"], chunks=self.chunks,
                                       cap=model.logit_cap, kernel=self.loss_kernel)
        # What does not count is left out before the formula: the exponential of a padding's ratio may overflow.
        counts_BT = batch["weights"] != 0
        logp_BT = jnp.where(batch["segments"] > 0, logp_BT, 0)
        loss_BT = LOSSES[self.loss_fn].of(jnp.where(counts_BT, logp_BT, 0), batch)
        return (jnp.where(counts_BT, loss_BT, 0) * batch["weights"]).sum(), {
            "logprobs": lax.stop_gradient(logp_BT), "places": batch["positions"]}
