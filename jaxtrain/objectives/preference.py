"""Preferences: learn from pairs of answers, of which one was chosen and the other rejected (DPO and its relatives).

A row holds whole pairs: segments 2k - 1 and 2k are the chosen and the rejected answer of its k-th pair, each with the
prompt in front, and weights are 1 where a target belongs to an answer (`data.packing=pairs` makes such rows).

Shape suffixes: B rows, T tokens, S segments of a row, P pairs of a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.schema import DataConfig, MeshConfig, TrainConfig
from jaxtrain.config.sections.tuning_keys import LoraConfig, PreferenceConfig
from jaxtrain.objectives.objective import of_sections
from jaxtrain.objectives.reference_policy import REFERENCE, Segments, WithReference, summed_over_rows
from jaxtrain.train_step.state import Batch, Metrics, Params, Skeleton


@dataclass(frozen=True, kw_only=True)
class Preference(WithReference):
    """The mean over pairs of a loss of how much likelier the chosen answer is than the rejected one."""

    settings: PreferenceConfig

    @of_sections
    @classmethod
    def of(cls, skeleton: Skeleton, *, model: ModelConfig, train: TrainConfig, data: DataConfig, mesh: MeshConfig,
           lora: LoraConfig, preference: PreferenceConfig) -> "Preference":
        """Return the objective that these sections of a config describe."""
        loss = LOSSES.get(preference.loss)  # a subclass has others
        return cls(**cls.fields_of(skeleton, loss is not None and loss.reference, model=model, train=train, data=data,
                                   mesh=mesh, lora=lora, preference=preference), settings=preference)

    @property
    def evaluation(self) -> "Preference":
        """The same loss without penalties."""
        return replace(self, penalties=False)

    @property
    def evaluation_metrics(self) -> Sequence[str]:
        """The rate and margin of agreement with the choices, and the policy's distance from its reference."""
        return "reward_accuracy", "reward_margin", *(("kl",) if self.reference is not None else ())

    def prepare(self, params: Params, batch: Batch) -> tuple[Params, Batch]:
        """The policy's parameters; the batch with the reference's log-probabilities, weighted by pairs."""
        own, batch = super().prepare(params, batch)
        begins_BT = (batch["positions"] == 0) & (batch["segments"] % 2 == 1)
        batch = batch | {"answers": batch["weights"], "weights": begins_BT.astype(jnp.float32)}
        return own, self.with_sums(params, own, batch)

    def end(self, params: Params, x_BTD: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss and the metrics, summed over pairs."""
        logp_BT = self.logprobs(self.model.merge(params), x_BTD, batch)
        arrays = {key: batch[key] for key in ("answers", "segments", REFERENCE) if key in batch}
        return summed_over_rows(partial(_of_rows, self.settings), arrays | {"policy": logp_BT})

    def metrics(self, sums: dict[str, jax.Array]) -> Metrics:
        """Return means over pairs: of rewards, of how often and by how much they agree, of answers' log-probabilities.

        `kl`: by how much likelier than under the reference the answers became, as a logarithm. It would estimate the
        divergence from the reference if the policy had sampled them.
        """
        pairs = jnp.maximum(sums["weight"], 1e-8)
        own = {name: sums[name] / pairs for name in METRICS if name in sums}
        return own | {"pairs": sums["weight"], **self.router_metrics(sums)}


# --------------------------------------------------------------------------------------------------------- the losses
@dataclass(frozen=True)
class Pairs:
    """Sums over the answers of pairs: log-probabilities of the policy and the reference, and tokens; chosen, rejected.
    """

    policy: tuple[jax.Array, jax.Array]
    reference: tuple[jax.Array, jax.Array]
    tokens: tuple[jax.Array, jax.Array]

    @property
    def margin(self) -> jax.Array:
        """The margin by which the policy prefers the chosen answer more than the reference does."""
        chosen, rejected = self.ratios
        return chosen - rejected

    @property
    def ratios(self) -> tuple[jax.Array, jax.Array]:
        """The logarithms of how much likelier each answer became."""
        return self.policy[0] - self.reference[0], self.policy[1] - self.reference[1]

    @property
    def means(self) -> tuple[jax.Array, jax.Array]:
        """The policy's log-probabilities per token."""
        return self.policy[0] / self.tokens[0], self.policy[1] / self.tokens[1]


@dataclass(frozen=True)
class Loss:
    """A loss of each pair."""

    of: Callable[[PreferenceConfig, Pairs], jax.Array]
    reference: bool  # whether it compares with one


def _sigmoid(c: PreferenceConfig, p: Pairs) -> jax.Array:
    """Direct preference optimization: Rafailov et al. (arXiv 2305.18290), smoothed as in its conservative form."""
    return _smoothed(c.beta * p.margin, c.label_smoothing)


def _robust(c: PreferenceConfig, p: Pairs) -> jax.Array:
    """DPO that is unbiased where a share `label_smoothing` of pairs is swapped (arXiv 2403.00409)."""
    right, wrong = _logistic(c.beta * p.margin), _logistic(-c.beta * p.margin)
    return ((1 - c.label_smoothing) * right - c.label_smoothing * wrong) / (1 - 2 * c.label_smoothing)


def _ipo(c: PreferenceConfig, p: Pairs) -> jax.Array:
    """Identity preference optimization (arXiv 2310.12036), per token, so that long answers are not preferred."""
    chosen, rejected = (ratio / tokens for ratio, tokens in zip(p.ratios, p.tokens, strict=True))
    return jnp.square(chosen - rejected - 1 / (2 * c.beta))


def _hinge(c: PreferenceConfig, p: Pairs) -> jax.Array:
    """A hinge on the same margin (SLiC, arXiv 2305.10425, with DPO's rewards)."""
    return jax.nn.relu(1 - c.beta * p.margin)


def _apo_zero(c: PreferenceConfig, p: Pairs) -> jax.Array:
    """Anchored preference optimization (arXiv 2408.06266), where chosen answers are better than the policy's own.

    The chosen answer becomes likelier and the rejected one less likely, each compared with the reference alone.
    """
    chosen, rejected = p.ratios
    return jax.nn.sigmoid(-c.beta * chosen) + jax.nn.sigmoid(c.beta * rejected)


def _apo_down(c: PreferenceConfig, p: Pairs) -> jax.Array:
    """Anchored preference optimization where the policy's own answers are better than both: both become less likely."""
    return jax.nn.sigmoid(c.beta * p.ratios[0]) + jax.nn.sigmoid(-c.beta * p.margin)


def _simpo(c: PreferenceConfig, p: Pairs) -> jax.Array:
    """Return the loss of SimPO (arXiv 2405.14734): without a reference, per token, with a margin."""
    chosen, rejected = p.means
    return _smoothed(c.beta * (chosen - rejected) - c.margin, c.label_smoothing)


def _orpo(c: PreferenceConfig, p: Pairs) -> jax.Array:
    """The odds ratio beside the chosen answer's cross-entropy per token: ORPO (arXiv 2403.07691)."""
    chosen, rejected = p.means
    odds = chosen - rejected - (_log_complement(chosen) - _log_complement(rejected))
    return c.beta * _logistic(odds) - chosen


LOSSES = {"dpo": Loss(_sigmoid, True), "robust": Loss(_robust, True), "ipo": Loss(_ipo, True),
          "hinge": Loss(_hinge, True), "apo_zero": Loss(_apo_zero, True), "apo_down": Loss(_apo_down, True),
          "simpo": Loss(_simpo, False), "orpo": Loss(_orpo, False)}


def _logistic(x: jax.Array) -> jax.Array:
    """-log sigmoid(x)."""
    return jax.nn.softplus(-x)


def _smoothed(x: jax.Array, smoothing: float) -> jax.Array:
    return (1 - smoothing) * _logistic(x) + smoothing * _logistic(-x)


def _log_complement(logp: jax.Array) -> jax.Array:
    """log(1 - exp(logp)); 0 would be certainty, which rounding can give."""
    return jnp.log1p(-jnp.exp(jnp.minimum(logp, -1e-6)))


METRICS = ("reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected",
           "kl")  # the last with a reference


def _measured(c: PreferenceConfig, p: Pairs) -> dict[str, jax.Array]:
    """The metrics of each pair. Rewards are beta x log-ratios to the reference, per token where the loss is."""
    against = p.ratios if LOSSES[c.loss].reference else p.means
    chosen, rejected = (c.beta * x for x in against)
    found = (chosen > rejected).astype(jnp.float32), chosen - rejected, chosen, rejected, *p.policy
    kl = ((p.ratios[0] + p.ratios[1]) / 2,) if LOSSES[c.loss].reference else ()
    return dict(zip(METRICS, (*found, *kl), strict=False))


# ------------------------------------------------------------------------------------------------- over pairs of rows
def _of_rows(c: PreferenceConfig, batch: Batch, segments: Segments) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return one device's share of the loss and the metrics, summed over the pairs of its rows."""
    def by_pair(x_BT):
        x_BS = segments.sums(x_BT)
        return x_BS[:, 1::2], x_BS[:, 2::2]

    weights_BT = batch["answers"]
    tokens = by_pair(weights_BT)
    reference = by_pair(batch.get(REFERENCE, jnp.zeros_like(weights_BT)))
    pairs = Pairs(by_pair(weights_BT * batch["policy"]), reference,
                  (jnp.maximum(tokens[0], 1), jnp.maximum(tokens[1], 1)))
    there_BP = (tokens[0] > 0) & (tokens[1] > 0)
    loss_BP = LOSSES[c.loss].of(c, pairs)
    if c.rpo_alpha:  # RPO: learn the chosen answers besides (arXiv 2404.19733)
        loss_BP -= c.rpo_alpha * pairs.means[0]
    found = {"loss": loss_BP, **lax.stop_gradient(_measured(c, pairs))}
    sums = {name: jnp.where(there_BP, x_BP, 0).sum() / segments.devices for name, x_BP in found.items()}
    return sums.pop("loss"), sums
