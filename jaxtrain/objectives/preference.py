"""Preferences: learn from pairs of answers, of which one was chosen and the other rejected (DPO and its relatives).

A row holds whole pairs: segments 2k - 1 and 2k are the chosen and the rejected answer of its k-th pair, each with the
prompt in front, and weights are 1 where a target belongs to an answer (`data.packing=pairs` makes such rows).

Losses that compare with a reference keep a frozen copy of what is trained, as it was when the run began: of all
parameters, or of adapters only. It runs forward before the policy, on the same mesh. Under a pipeline every stage runs
all of its layers on the batch of its devices.

Shape suffixes: B rows, T tokens, S segments of a row, P pairs of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.config.schema import Config
from jaxtrain.config.tuning_keys import PreferenceConfig
from jaxtrain.kernels.token_cross_entropy import token_cross_entropy
from jaxtrain.models import Compute, make_model
from jaxtrain.models.trained_parameters import is_frozen
from jaxtrain.objectives.next_token import NextToken
from jaxtrain.sharding import rules as sharding
from jaxtrain.train_step import partition
from jaxtrain.train_step.state import Skeleton

REFERENCE = "reference"  # the key of its parameters among the frozen ones, and of its log-probabilities in a batch


@dataclass(frozen=True, kw_only=True)
class Preference(NextToken):
    """The mean over pairs of a loss of how much likelier the chosen answer is than the rejected one."""

    settings: PreferenceConfig
    reference: Skeleton | None  # the model as it computes the reference; None: the loss needs none
    trained: Any  # the axes of what is trained, which the reference has its own copy of

    @classmethod
    def of(cls, config: Config, model: Skeleton) -> "Preference":
        """As a config describes it."""
        reference = None
        if LOSSES[config.preference.loss].reference:
            compute = replace(Compute.of(config), remat="none")
            reference = Skeleton.of(nnx.eval_shape(lambda: make_model(
                config.model, compute, config.lora, rngs=nnx.Rngs(params=jax.random.key(0)))))
        trained, _ = partition.split(model.axes(), is_frozen(config, model.axes()))
        plain = replace(NextToken.of(config, model), mtp_loss_weight=0.0)
        return cls(**vars(plain), settings=config.preference, reference=reference, trained=trained)

    @property
    def evaluation(self) -> "Preference":
        """The same loss without penalties."""
        return replace(self, penalties=False)

    def prepare(self, params: Any, batch: Any) -> tuple[Any, Any]:
        """The policy's parameters; the batch with the reference's log-probabilities, weighted by pairs."""
        own, batch = super().prepare(params, batch)
        begins_BT = (batch["positions"] == 0) & (batch["segments"] % 2 == 1)
        batch = batch | {"answers": batch["weights"], "weights": begins_BT.astype(jnp.float32)}
        if self.reference is None:
            return own, batch
        frozen = jax.tree.map(_on_all_stages, partition.without(own, params[REFERENCE]))
        model = self.reference.merge(lax.stop_gradient(partition.merge(params[REFERENCE], frozen)))
        x_BTD, _ = model.through(model.begin(batch["tokens"], batch["positions"]), batch["segments"],
                                 batch["positions"])
        entropy_BT = token_cross_entropy(model.finish(x_BTD), model.head(), batch["targets"], chunks=self.chunks)
        return own, batch | {REFERENCE: lax.stop_gradient(-entropy_BT)}

    def end(self, params: Any, x_BTD: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss and the metrics, summed over pairs."""
        model = self.model.merge(params)
        logp_BT = -token_cross_entropy(model.finish(x_BTD), model.head(), batch["targets"], chunks=self.chunks)
        reference_BT = batch.get(REFERENCE, jnp.zeros_like(logp_BT))
        return _summed(self.settings, logp_BT, reference_BT, batch["answers"], batch["segments"])

    def metrics(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return means over pairs: of rewards, of how often and by how much they agree, of answers' log-probabilities.
        """
        pairs = jnp.maximum(sums["weight"], 1e-8)
        own = {name: sums[name] / pairs for name in METRICS}
        return own | {"pairs": sums["weight"], **self.router_metrics(sums)}

    @property
    def evaluation_metrics(self) -> Sequence[str]:
        """How often and by how much rewards agree with the choices."""
        return "reward_accuracy", "reward_margin"

    @property
    def frozen_axes(self) -> dict:
        """The reference's logical names. Its layers are not a stage's own: the policy's layers are."""
        if self.reference is None:
            return {}
        return {REFERENCE: jax.tree.map(lambda names: tuple(None if name == "layers" else name for name in names),
                                        self.trained, is_leaf=lambda x: isinstance(x, tuple))}

    def frozen_metadata(self, key: str) -> dict:
        """Return the metadata of what it is a copy of."""
        return {} if self.reference is None else {REFERENCE: partition.like(self.model.metadata(key, ""), self.trained)}

    def init_frozen(self, key: jax.Array, params: Any) -> dict:
        """Return a copy of the trained parameters."""
        return {} if self.reference is None else {REFERENCE: partition.like(params, self.trained)}

    def identity(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Return nothing: the config says it all."""
        return {}


def _on_all_stages(weight: jax.Array) -> jax.Array:
    """Gather a weight over the stages of a pipeline."""
    if sharding.activation_spec() is None:
        return weight
    spec = jax.typeof(weight).sharding.spec
    kept = [tuple(axis for axis in sharding.axes_of(entry) if axis != "stage") or None for entry in spec]
    return jax.reshard(weight, P(*kept))


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
        """How much more the policy prefers the chosen answer than the reference does."""
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


def _simpo(c: PreferenceConfig, p: Pairs) -> jax.Array:
    """Without a reference, per token, with a margin: SimPO (arXiv 2405.14734)."""
    chosen, rejected = p.means
    return _smoothed(c.beta * (chosen - rejected) - c.margin, c.label_smoothing)


def _orpo(c: PreferenceConfig, p: Pairs) -> jax.Array:
    """The odds ratio beside the chosen answer's cross-entropy per token: ORPO (arXiv 2403.07691)."""
    chosen, rejected = p.means
    odds = chosen - rejected - (_log_complement(chosen) - _log_complement(rejected))
    return c.beta * _logistic(odds) - chosen


LOSSES = {"dpo": Loss(_sigmoid, True), "robust": Loss(_robust, True), "ipo": Loss(_ipo, True),
          "hinge": Loss(_hinge, True), "simpo": Loss(_simpo, False), "orpo": Loss(_orpo, False)}


def _logistic(x: jax.Array) -> jax.Array:
    """-log sigmoid(x)."""
    return jax.nn.softplus(-x)


def _smoothed(x: jax.Array, smoothing: float) -> jax.Array:
    return (1 - smoothing) * _logistic(x) + smoothing * _logistic(-x)


def _log_complement(logp: jax.Array) -> jax.Array:
    """log(1 - exp(logp)); 0 would be certainty, which rounding can give."""
    return jnp.log1p(-jnp.exp(jnp.minimum(logp, -1e-6)))


METRICS = ("reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected")


def _measured(c: PreferenceConfig, p: Pairs) -> dict[str, jax.Array]:
    """The metrics of each pair. Rewards are beta x log-ratios to the reference, per token where the loss is."""
    against = p.ratios if LOSSES[c.loss].reference else p.means
    chosen, rejected = (c.beta * x for x in against)
    found = (chosen > rejected).astype(jnp.float32), chosen - rejected, chosen, rejected, *p.policy
    return dict(zip(METRICS, found, strict=True))


# ------------------------------------------------------------------------------------------------- over pairs of rows
def _summed(c: PreferenceConfig, *arrays_BT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss and the metrics, summed over the pairs of a batch (of a device's part of it, in a pipeline).

    The arrays are log-probabilities of the policy and the reference, weights of answers, and segments.
    """
    if sharding.activation_spec() is None:
        return _of_rows(c, (), *arrays_BT)
    rows, tokens = sharding.split_by("batch"), sharding.split_by("seq")
    free = sharding.axes_of(rows) + sharding.axes_of(tokens)

    def local(*arrays_BT):
        sums = _of_rows(c, sharding.axes_over("seq"), *arrays_BT)
        return jax.tree.map(lambda x: lax.psum(x, free) if free else x, sums)

    return sharding.manual_region(local, in_specs=(P(rows, tokens),) * len(arrays_BT), out_specs=P())(*arrays_BT)


def _of_rows(c: PreferenceConfig, seq_axes: tuple[str, ...], logp_BT, reference_BT, weights_BT,
             segments_BT) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return one device's share of the sums. Devices that share a sequence each take an equal part of its pairs' loss.
    """
    size = lax.psum(1, seq_axes) if seq_axes else 1
    segments = segments_BT.shape[1] * size + 1  # at most, with the one that is padding

    def by_pair(x_BT):
        x_BS = jax.vmap(lambda x_T, s_T: jax.ops.segment_sum(x_T, s_T, segments + segments % 2 + 1))(x_BT, segments_BT)
        x_BS = lax.psum(x_BS, seq_axes) if seq_axes else x_BS
        return x_BS[:, 1::2], x_BS[:, 2::2]

    tokens = by_pair(weights_BT)
    there_BP = (tokens[0] > 0) & (tokens[1] > 0)
    pairs = Pairs(by_pair(weights_BT * logp_BT), by_pair(weights_BT * reference_BT),
                  (jnp.maximum(tokens[0], 1), jnp.maximum(tokens[1], 1)))
    found = {"loss": LOSSES[c.loss].of(c, pairs), **lax.stop_gradient(_measured(c, pairs))}
    sums = {name: jnp.where(there_BP, x_BP, 0).sum() / size for name, x_BP in found.items()}
    return sums.pop("loss"), sums
