"""Policy gradients whose step also says each token's log-probability, and what it would have drawn (`rl.exact`).

A step of this objective is its own sampler: given drafts of answers, it returns for each token the log-probability that
it computes and the token that it draws there, from the same logits. Answers that are what it draws are its own, with
these log-probabilities to the last bit (exact_answers.py).

What it says of tokens are further sums, of all rows' tokens in their places, so that they pass through micro-batches,
pipelines and meshes as any sum does.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.schema import DataConfig, MeshConfig, TrainConfig
from jaxtrain.config.sections.tuning_keys import LoraConfig, PreferenceConfig, RLConfig
from jaxtrain.data.loading.batch_spec import Declared
from jaxtrain.kernels.loss_head.token_cross_entropy import cross_entropy_and_draws
from jaxtrain.models.decoder import Decoder
from jaxtrain.objectives.objective import of_sections
from jaxtrain.objectives.policy_gradient import PolicyGradient
from jaxtrain.objectives.reference_policy import Segments
from jaxtrain.train_step.state import Batch, Skeleton

PLACE = "place"  # of each token among those of all rows
KEYS = ("draw_low", "draw_high", "draw_known")  # the key to draw with, and from how many columns of the vocabulary
SAID, DRAWN = "said", "drawn"  # of the tokens of all rows: their log-probabilities, and what the step draws there
MISMATCH = "sampler_mismatch_max"  # the largest difference between the log-probabilities of step and sampler


@dataclass(frozen=True, kw_only=True)
class ExactPolicyGradient(PolicyGradient):
    """The clipped policy-gradient loss of answers that the step itself drew."""

    places: int  # tokens of all rows

    @of_sections
    @classmethod
    def of(cls, skeleton: Skeleton, *, model: ModelConfig, train: TrainConfig, data: DataConfig, mesh: MeshConfig,
           lora: LoraConfig, preference: PreferenceConfig, rl: RLConfig) -> "ExactPolicyGradient":
        """Return the objective that these sections of a config describe."""
        plain = PolicyGradient.of(skeleton, model=model, train=train, data=data, mesh=mesh, lora=lora,
                                  preference=preference, rl=rl)
        return cls(**vars(plain), places=data.global_batch_size * data.seq_len)

    @property
    def batch_spec(self) -> Declared:
        """The arrays of a policy gradient, and where each token is and what to draw it with."""
        return {**super().batch_spec, PLACE: np.int32, "draw_low": np.uint32, "draw_high": np.uint32,
                "draw_known": np.int32}

    def predicted(self, model: Decoder, x_BTD: jax.Array, batch: Batch) -> Batch:
        """The log-probability of each target, the entropy of its prediction, and a token drawn from that."""
        keys = batch["draw_low"], batch["draw_high"], batch["draw_known"]
        cross_BT, entropy_BT, drawn_BT = cross_entropy_and_draws(
            **self._head(model, x_BTD, batch), keys=keys, learnt=self.settings.entropy > 0)
        return {"policy": -cross_BT, "entropy": entropy_BT, DRAWN: drawn_BT, PLACE: batch[PLACE]}

    def of_rows(self, batch: Batch, segments: Segments) -> tuple[jax.Array, dict[str, jax.Array]]:
        """One device's share of the loss and of the metrics, and what it says of its tokens."""
        loss, sums = super().of_rows(batch, segments)
        learnt_BT = batch["learnt"] > 0
        put = partial(_in_places, batch[PLACE], self.places)
        said_BT, apart_BT = batch["policy"], jnp.abs(batch["policy"] - batch["sampled"])
        return loss, lax.stop_gradient(sums | {
            SAID: put(said_BT), DRAWN: put(batch[DRAWN].astype(jnp.float32)),  # a token's number is exact in float32
            MISMATCH: put(jnp.where(learnt_BT, apart_BT, 0))})

    def metrics(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The metrics of a policy gradient, and what the step says of each token, as arrays."""
        return super().metrics(sums) | {MISMATCH: sums[MISMATCH].max(), SAID: sums[SAID], DRAWN: sums[DRAWN]}


def _in_places(place_BT: jax.Array, places: int, x_BT: jax.Array) -> jax.Array:
    """Return the values of some tokens in their places among those of all rows."""
    return jnp.zeros(places, jnp.float32).at[place_BT.reshape(-1)].set(x_BT.reshape(-1))
