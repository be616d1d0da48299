"""Next-token prediction: cross-entropy of each token given those before it, with the penalties that a model reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.config.model_config import ModelConfig
from jaxtrain.config.schema import DataConfig, TrainConfig
from jaxtrain.data.loading.batch_spec import Declared
from jaxtrain.kernels.loss_head.cross_entropy import cross_entropy, penalized_cross_entropy
from jaxtrain.models import training_noise
from jaxtrain.models.decoder import Decoder
from jaxtrain.objectives.objective import OfTheModelAlone, of_sections
from jaxtrain.observe.own_parts import describe
from jaxtrain.parallel.cut_rows import arrange
from jaxtrain.parallel.pipeline.parts import Parts
from jaxtrain.train_step import partition
from jaxtrain.train_step.state import Batch, Params, Skeleton

if TYPE_CHECKING:
    from jaxtrain.parallel.pipeline.stage_placement import Slots


@dataclass(frozen=True)
class NextToken(OfTheModelAlone):
    """The default objective of a decoder."""

    model: Skeleton
    chunks: int = 0  # pieces that tokens take through the loss head; 0: chosen by size
    z_loss: float = 0.0
    mtp_loss_weight: float = 0.0  # of predicting tokens after the next; 0: the model does not
    experts_per_token: int = 0
    cross_documents: bool = False  # a row is one text: attention and positions run on where a document ends
    penalties: bool = True  # add what the model reports, such as its routers' load-balance loss
    mtp_layers: int = 1  # how many tokens after the next are predicted
    loss_kernel: str = "auto"  # what reads the logits

    @of_sections
    @classmethod
    def of(cls, skeleton: Skeleton, *, model: ModelConfig, train: TrainConfig, data: DataConfig) -> "NextToken":
        """Return the objective that these sections of a config describe."""
        return cls(skeleton, train.loss_chunks, train.z_loss, model.multi_token_loss, model.experts.per_token,
                   data.cross_document_attention, mtp_layers=model.multi_token_layers, loss_kernel=train.loss_kernel)

    @property
    def batch_spec(self) -> Declared:
        """Tokens and the tokens to predict, which document each is of and where in it, and what each weighs."""
        return {"tokens": np.int32, "targets": np.int32, "segments": np.int32, "positions": np.int32,
                "weights": np.float32}

    @property
    def evaluation(self) -> "NextToken":
        """The cross-entropy alone, on the tokens that this objective learns from."""
        return replace(self, z_loss=0.0, mtp_loss_weight=0.0, penalties=False)

    def loss(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Return the summed loss with penalties, the weight to divide it by, and what the layers summed up."""
        return self.pipeline_parts.loss(params, batch)

    def metrics(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the cross-entropy in nats per token, its exponential, unknown ids, and the metrics of routers."""
        entropy = sums["cross_entropy"] / jnp.maximum(sums["weight"], 1e-8)
        plain = {"cross_entropy": entropy, "perplexity": jnp.exp(entropy), "unknown_ids": sums["unknown_ids"]}
        return plain | self.router_metrics(sums)

    def router_metrics(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the metrics of the model's routers, if it has any."""
        if "load" not in sums:
            return {}
        from jaxtrain.models.experts import moe

        return moe.metrics(sums, self.experts_per_token)

    @property
    def pipeline_parts(self) -> Parts:
        """Embeddings, layers, and the loss of the head."""
        return Parts(stacks(self.model.params()), self.prepare, lambda batch: batch["weights"].sum(), self.begin,
                     self.middle, self.end)

    def prepare(self, params: Params, batch: Batch) -> tuple[Params, Batch]:
        """The model's own parameters, and the batch as its devices share it."""
        if self.mtp_loss_weight:
            from jaxtrain.objectives.further_tokens import with_further_targets

            batch = with_further_targets(batch, self.mtp_layers)
        if self.cross_documents:
            positions_BT = jnp.broadcast_to(jnp.arange(batch["tokens"].shape[1]), batch["tokens"].shape)
            batch = batch | {"positions": positions_BT, "segments": batch["segments"] > 0}
        return partition.like(params, self.model.params()), arrange(batch)

    def begin(self, params: Params, batch: Batch) -> jax.Array:
        """Embeddings."""
        with training_noise.of(batch):
            return self.model.merge(params).begin(batch["tokens"], batch["positions"], batch)

    def middle(self, params: Params, x_BTD: jax.Array, batch: Batch,
               slots: 'Mapping[str, Slots] | None' = None) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """All layers that `params` holds -> activations, summed penalties, and what else is summed for metrics."""
        with training_noise.of(batch):
            x_BTD, aux = self.model.merge(params).through(x_BTD, batch["segments"], batch["positions"], slots)
        penalty = _weighted(aux.pop("penalty", None), batch)
        return x_BTD, penalty if self.penalties else jnp.zeros_like(penalty), aux

    def end(self, params: Params, x_BTD: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The summed loss of the head, and the mean of those of predicting tokens after the next that the batch has.

        The further sum is the cross-entropy of the head without any penalty.
        """
        model = self.model.merge(params)
        head_DV = model.head()
        last_BTD = model.finish(x_BTD)
        loss, plain = self.head_loss(params, last_BTD, head_DV, batch)
        if "predicted_2_targets" in batch:
            from jaxtrain.objectives.further_tokens import further_losses

            def entropy(y_BTD, targets_BT, weights_BT):
                return cross_entropy(y_BTD, head_DV, targets_BT, weights_BT, z_loss=self.z_loss, chunks=self.chunks,
                                     cap=model.logit_cap, kernel=self.loss_kernel)

            read_BTD = last_BTD if model.mtp_after_norm else x_BTD
            for one, penalty in further_losses(model, read_BTD, batch, self.mtp_layers, entropy):
                loss += self.mtp_loss_weight / self.mtp_layers * one + _weighted(penalty, batch)
        return loss, {"cross_entropy": plain, "unknown_ids": _unknown_ids(batch, head_DV.shape[1])}

    def head_loss(self, params: Params, x_BTD: jax.Array, head_DV: jax.Array,
                  batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The summed loss of final activations, and their cross-entropy alone."""
        return penalized_cross_entropy(x_BTD, head_DV, batch["targets"], batch["weights"], z_loss=self.z_loss,
                                       chunks=self.chunks, cap=self.model.merge(params).logit_cap,
                                       kernel=self.loss_kernel)

    @property
    def evaluation_metrics(self) -> Sequence[str]:
        """No metric: an evaluation reports the loss per token and what follows from it."""
        return ()

    def identity(self, recorded: JsonMapping) -> JsonObject:
        """Return the class and its settings, but how many pieces the loss is computed in, and what the model says."""
        return describe(self, leave_out=("chunks", "mtp_layers"))


def stacks(params: Params, names: Sequence[str] = Decoder.STACKS) -> dict[str, int]:
    """Return which of the parameters are stacks of layers, in order, and how many layers each has."""
    return {key: len(jax.tree.leaves(params[key])[0]) for key in names if key in params}


def _unknown_ids(batch: Batch, vocab_size: int) -> jax.Array:
    """Count ids outside of the vocabulary among tokens and targets: they are trained on as other tokens."""
    pairs = (batch["tokens"], batch["segments"]), (batch["targets"], batch["weights"])
    return sum(((((ids < 0) | (ids >= vocab_size)) & (counts > 0)).sum(dtype=jnp.float32) for ids, counts in pairs),
               jnp.zeros(()))


def _weighted(penalty_LB: jax.Array | None, batch: Batch) -> jax.Array:
    """Rows' penalties, of one layer or several, summed by what the rows weigh."""
    return jnp.zeros(()) if penalty_LB is None else (penalty_LB * batch["weights"].sum(1)).sum()
