"""The label of a clip: the cross-entropy of the one label that each clip has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.modality_families import ClipsConfig
from jaxtrain.config.schema import TrainConfig
from jaxtrain.data.loading.batch_spec import SEQ, Array, Declared
from jaxtrain.models.modalities.clip_encoder import BANDS
from jaxtrain.objectives.next_token import stacks
from jaxtrain.objectives.objective import OfTheModelAlone, of_sections, without_z_loss
from jaxtrain.parallel.cut_rows import arrange, row_copies
from jaxtrain.parallel.pipeline.parts import Parts
from jaxtrain.sharding import activations
from jaxtrain.train_step.state import Batch, Params, Skeleton

if TYPE_CHECKING:
    from jaxtrain.parallel.pipeline.stage_placement import Slots


@dataclass(frozen=True)
class ClipLabel(OfTheModelAlone):
    """The mean over clips of the cross-entropy of their labels."""

    model: Skeleton
    labels: int

    @of_sections
    @classmethod
    def of(cls, skeleton: Skeleton, *, model: ClipsConfig, train: TrainConfig) -> "ClipLabel":
        """Return the objective that these sections of a config describe."""
        without_z_loss(model, train)
        return cls(skeleton, model.labels)

    @property
    def batch_spec(self) -> Declared:
        """Frames, which of them there are, and a label for each clip."""
        return {"features": Array(np.float16, (SEQ, BANDS)), "weights": np.float32,
                "label": Array(np.int32, (), below=self.labels)}

    @property
    def evaluation(self) -> "ClipLabel":
        """The same."""
        return self

    @property
    def evaluation_metrics(self) -> Sequence[str]:
        """The accuracy: how often the most probable label is right."""
        return ("accuracy",)

    def metrics(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the mean over clips."""
        return {"accuracy": sums["right"] / jnp.maximum(sums["weight"], 1e-8)}

    def loss(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Return the summed cross-entropy, the number of clips, and how many are right."""
        return self.pipeline_parts.loss(params, batch)

    @property
    def pipeline_parts(self) -> Parts:
        """Embeddings of frames, layers, and the cross-entropy of labels."""
        def prepare(params: Params, batch: Batch) -> tuple[Params, Batch]:
            there_BT = activations.constrain(batch["weights"], "batch", None)
            positions_BT = jnp.broadcast_to(jnp.arange(there_BT.shape[1]), there_BT.shape)
            rows = arrange({"features": batch["features"], "weights": there_BT, "positions": positions_BT})
            return params, batch | rows | {"frames": there_BT.sum(1)}

        def begin(params: Params, batch: Batch) -> jax.Array:
            return self.model.merge(params).begin(batch["features"])

        def middle(params: Params, x_BTD: jax.Array, batch: Batch,
                   slots: 'Mapping[str, Slots] | None') -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
            return self.model.merge(params).through(
                x_BTD, batch["weights"], batch["positions"], slots), jnp.zeros(()), {}

        return Parts(stacks(self.model.params()), prepare, lambda batch: _there(batch).sum(), begin, middle, self._end)

    def _end(self, params: Params, x_BTD: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The summed cross-entropy, and how many are right."""
        there_B = _there(batch) / row_copies()
        logits_BL = self.model.merge(params).finish(x_BTD, batch["weights"], batch["frames"])
        hit_BL = batch["label"][:, None] == jnp.arange(self.labels)
        correct_B = jnp.where(hit_BL, logits_BL, 0).sum(1)
        entropy_B = jax.nn.logsumexp(logits_BL, axis=1) - correct_B
        right = ((correct_B >= logits_BL.max(1)) * there_B).sum()
        return (entropy_B * there_B).sum(), {"right": right}


def _there(batch: Batch) -> jax.Array:
    """Return 1 for each clip: rows that only fill a batch have no frames."""
    return (batch["frames"] > 0).astype(jnp.float32)
