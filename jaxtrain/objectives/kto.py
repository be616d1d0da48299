"""KTO: learn from answers that are labelled as desirable or not (Ethayarajh et al., arXiv 2402.01306).

With h, the logarithm of how much likelier an answer became, a desirable one has the loss w (1 - sigmoid(beta (h - z)))
and an undesirable one w (1 - sigmoid(beta (z - h))). z is how far the policy is from the reference: the mean of h over
prompts with the answers of others, at least 0, without a gradient. It is that of the whole batch; with
`train.accumulation` that of each micro-batch.

A row holds whole answers: each segment is one, with its prompt in front (`data.packing=answers` makes such rows).

Shape suffixes: B rows, T tokens, S segments of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.schema import DataConfig, MeshConfig, TrainConfig
from jaxtrain.config.sections.tuning_keys import LoraConfig, PreferenceConfig
from jaxtrain.data.loading.batch_spec import Declared
from jaxtrain.data.packing.answer_rows import COLUMNS, MISMATCHED
from jaxtrain.objectives.objective import of_sections
from jaxtrain.objectives.reference_policy import REFERENCE, Segments, WithReference, summed_over_rows
from jaxtrain.train_step.state import Batch, Params, Skeleton

BASELINE = "baseline"  # z, the same number for every token


@dataclass(frozen=True, kw_only=True)
class Kto(WithReference):
    """The mean over answers of KTO's loss."""

    settings: PreferenceConfig

    @of_sections
    @classmethod
    def of(cls, skeleton: Skeleton, *, model: ModelConfig, train: TrainConfig, data: DataConfig, mesh: MeshConfig,
           lora: LoraConfig, preference: PreferenceConfig) -> "Kto":
        """Return the objective that these sections of a config describe."""
        return cls(**cls.fields_of(skeleton, True, model=model, train=train, data=data, mesh=mesh, lora=lora,
                                   preference=preference), settings=preference)

    @property
    def batch_spec(self) -> Declared:
        """The arrays of next-token prediction, labels, and prompts with the answers of others."""
        return {**super().batch_spec, **COLUMNS}

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The rows of answers, and of prompts with the answers of others."""
        return "", MISMATCHED

    @property
    def evaluation(self) -> "Kto":
        """The same loss without penalties."""
        return replace(self, penalties=False)

    @property
    def evaluation_metrics(self) -> Sequence[str]:
        """The margin by which desirable answers have higher rewards, and the divergence from the reference."""
        return "reward_margin", "kl"

    def prepare(self, params: Params, batch: Batch) -> tuple[Params, Batch]:
        """The policy's parameters; the batch with the reference's log-probabilities and z, weighted by answers."""
        own, batch = super().prepare(params, batch)
        others = {key.removeprefix(MISMATCHED): batch[key] for key in batch if key.startswith(MISMATCHED)}
        batch = {key: x for key, x in batch.items() if not key.startswith(MISMATCHED)}
        begins_BT = (batch["positions"] == 0) & (batch["segments"] > 0)
        batch |= {"answers": batch["weights"], "weights": begins_BT.astype(jnp.float32)}
        others = self.with_sums(params, own, others | {"answers": others["weights"]})
        arrays = {key: others[key] for key in ("segments", "positions", "answers", REFERENCE)}
        total, count = summed_over_rows(_mismatched, arrays | {"policy": self.computed_whole(own, others)})
        baseline_BT = jnp.zeros_like(batch["weights"]) + jnp.maximum(total / jnp.maximum(count, 1), 0)
        return own, self.with_sums(params, own, batch) | {BASELINE: baseline_BT}

    def end(self, params: Params, x_BTD: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss and the metrics, summed over answers."""
        logp_BT = self.logprobs(self.model.merge(params), x_BTD, batch)
        arrays = {key: batch[key] for key in ("answers", "segments", "labels", BASELINE, REFERENCE)}
        return summed_over_rows(partial(_of_rows, self.settings), arrays | {"policy": logp_BT})

    def metrics(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the mean rewards, beta h, of desirable and undesirable answers, their difference, z, and counts."""
        answers = jnp.maximum(sums["weight"], 1e-8)
        counts = sums["desirable"], sums["weight"] - sums["desirable"]
        good, bad = (sums[f"reward_{name}"] / jnp.maximum(count, 1e-8)
                     for name, count in zip(("desirable", "undesirable"), counts, strict=True))
        return {"reward_margin": good - bad, "reward_desirable": good, "reward_undesirable": bad,
                "kl": sums["kl"] / answers, "answers": sums["weight"], "desirable": counts[0] / answers,
                **self.router_metrics(sums)}


def _mismatched(batch: Batch, segments: Segments) -> tuple[jax.Array, jax.Array]:
    """Return one device's share of the sum of h over prompts with the answers of others, and of how many there are."""
    begins_BT = (batch["positions"] == 0) & (segments.numbers_BT > 0)
    h_BS = segments.sums(batch["answers"] * batch["policy"]) - segments.sums(batch[REFERENCE])
    return h_BS.sum() / segments.devices, begins_BT.sum(dtype=jnp.float32)


def _of_rows(c: PreferenceConfig, batch: Batch, segments: Segments) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return one device's share of the loss and the metrics, summed over the answers of its rows."""
    answers_BT, z = batch["answers"], batch[BASELINE][0, 0]
    there_BS = segments.sums(answers_BT) > 0
    good_BS = segments.sums(answers_BT * batch["labels"]) > 0
    h_BS = segments.sums(answers_BT * batch["policy"]) - segments.sums(batch[REFERENCE])
    loss_BS = jnp.where(good_BS, c.desirable_weight * jax.nn.sigmoid(c.beta * (z - h_BS)),
                        c.undesirable_weight * jax.nn.sigmoid(c.beta * (h_BS - z)))
    measured = {"reward_desirable": good_BS * c.beta * h_BS, "reward_undesirable": ~good_BS * c.beta * h_BS,
                "desirable": good_BS.astype(jnp.float32), "kl": jnp.broadcast_to(z, h_BS.shape)}
    found = {"loss": loss_BS, **lax.stop_gradient(measured)}
    sums = {name: jnp.where(there_BS, x_BS, 0).sum() / segments.devices for name, x_BS in found.items()}
    return sums.pop("loss"), sums
