"""Contrastive learning: images and texts that belong together are to be alike, and others not.

The other pairs of a batch are what a pair is compared with; with `train.accumulation` those of its micro-batch.

Shape suffixes: B rows, S images of a row, T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.base.annotations import PyTree
from jaxtrain.config.schema import TrainConfig
from jaxtrain.config.sections.compression_keys import CompressionConfig
from jaxtrain.config.vision_keys import DualEncoderConfig
from jaxtrain.data.loading.batch_spec import SEQ, Array, Declared
from jaxtrain.errors import UserError
from jaxtrain.models.vision import pooling
from jaxtrain.models.vision.dual_encoder import STACKS
from jaxtrain.objectives.objective import OfTheModelAlone, of_sections, without_z_loss
from jaxtrain.parallel.all_pairs import all_pairs, count_matched
from jaxtrain.parallel.cut_rows import whole_rows
from jaxtrain.parallel.pipeline.parts import Parts
from jaxtrain.sharding import activations
from jaxtrain.train_step import partition
from jaxtrain.train_step.state import Batch, Params, Skeleton

if TYPE_CHECKING:
    from jaxtrain.parallel.pipeline.stage_placement import Slots


def patches_spec(c: Any) -> dict[str, Array]:
    """Return the arrays of rows of patches."""
    return {"images": Array(np.int32, below=c.images_per_row + 1),
            "patches": Array(np.uint8, (SEQ, c.patch_values)),
            "places": Array(np.int32, (SEQ, 2), below=c.patches_per_side + (c.class_at is not None))}


@dataclass(frozen=True)
class Contrastive(OfTheModelAlone):
    """The mean over pairs of SigLIP's sigmoid loss or CLIP's softmax loss."""

    model: Skeleton
    shape: DualEncoderConfig
    evaluates: bool = False  # count how many images are nearest to their own text

    @of_sections
    @classmethod
    def of(cls, skeleton: Skeleton, *, model: DualEncoderConfig, train: TrainConfig,
           compression: CompressionConfig) -> "Contrastive":
        """Return the objective that these sections of a config describe."""
        without_z_loss(model, train)
        if compression.method:
            raise UserError("compression.method", f"{model.name} compares pairs over the whole batch, of which "
                            "each part of the mesh would see its own alone", "leave it out")
        return cls(skeleton, model)

    @property
    def batch_spec(self) -> Declared:
        """Patches, texts in places of their own, and which pairs there are."""
        texts = Array(np.int32, (self.shape.images_per_row * self.shape.text_len,))
        return {**patches_spec(self.shape), "tokens": replace(texts, below=self.shape.vocab_size),
                "segments": replace(texts, below=self.shape.images_per_row + 1),
                "positions": replace(texts, below=self.shape.text_len),
                "weights": Array(np.float32, (self.shape.images_per_row,))}

    @property
    def evaluation(self) -> "Contrastive":
        """The same loss, and the accuracy."""
        return replace(self, evaluates=True)

    @property
    def evaluation_metrics(self) -> Sequence[str]:
        """The accuracy of retrieval: how often the nearest text is the image's own, or one equal to it."""
        return ("accuracy",)

    def metrics(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the number of pairs, the scale and the bias of similarities, and in evaluation the accuracy."""
        pairs = jnp.maximum(sums["weight"], 1e-8)
        return {"pairs": sums["weight"], **{name: sums[name] / pairs for name in ("scale", "bias", "accuracy")
                                            if name in sums}}

    def loss(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Return the summed loss, the number of pairs, and sums for the metrics."""
        return self.pipeline_parts.loss(params, batch)

    @property
    def pipeline_parts(self) -> Parts:
        """Embeddings, the layers of both encoders, and the vectors of images and texts, which are then compared."""
        def prepare(params: Params, batch: Batch) -> tuple[Params, Batch]:
            own = partition.like(params, self.model.params())
            return own, self.model.merge(own).arranged(batch)

        def middle(params: Params, x: PyTree, batch: Batch,
                   slots: 'Mapping[str, Slots] | None') -> tuple[PyTree, jax.Array, dict[str, jax.Array]]:
            return self.model.merge(params).through(x, batch, slots), jnp.zeros(()), {}

        layers = dict(zip(STACKS, (self.shape.image_layers, self.shape.num_layers), strict=True))
        return Parts(layers, prepare, lambda batch: batch["weights"].sum(),
                     lambda params, batch: self.model.merge(params).begin(batch), middle, self._vectors,
                     self._compared, side_by_side=True)

    def _vectors(self, params: Params, x: PyTree, batch: Batch) -> dict[str, jax.Array]:
        """Both vectors of each pair, and the scale and the bias of similarities for each row."""
        model = self.model.merge(params)
        x_BSE, y_BSE = model.finish(x, batch)
        similarity_B2 = jnp.broadcast_to(jnp.stack(model.similarity()), (len(x_BSE), 2))
        return {"x": x_BSE, "y": y_BSE, "similarity": activations.constrain(similarity_B2, "batch", None)}

    def _compared(self, found: dict[str, jax.Array], batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The summed loss of all pairs, and sums for the metrics."""
        pairs, places = batch["weights"].sum(), pooling.slots(batch["weights"].shape[1])
        x_BSE, y_BSE, there_BS = (jnp.pad(a, ((0, 0), (0, places - a.shape[1]), (0, 0))[:a.ndim])
                                  for a in (found["x"], found["y"], batch["weights"]))
        # All rows have the same ones; those of the first are read, so that their gradient counts once.
        first_B1 = activations.constrain(jnp.arange(len(x_BSE)) == 0, "batch")[:, None]
        scale, bias = jnp.where(first_B1, found["similarity"], 0).sum(0)
        total = all_pairs("softmax" if self.shape.name == "clip" else "sigmoid", x_BSE, y_BSE, there_BS, (scale, bias))
        sums = {"scale": pairs * scale, "bias": pairs * bias}
        if self.evaluates:
            sums["accuracy"] = count_matched(x_BSE, y_BSE, there_BS, _fingerprints(batch))
        return total, jax.lax.stop_gradient(sums)


def _fingerprints(batch: Batch) -> jax.Array:
    """Return a number for each text [B, S], the same for equal texts and by all odds for no others."""
    tokens_BT, positions_BT = (batch[name].astype(jnp.uint32) for name in ("tokens", "positions"))
    mixed_BT = (tokens_BT + 1) * (positions_BT * jnp.uint32(2654435761) + 40503)
    mixed_BT = (mixed_BT ^ (mixed_BT >> 15)) * jnp.uint32(2246822519)
    mixed_BT = jax.lax.bitcast_convert_type(mixed_BT ^ (mixed_BT >> 13), jnp.int32)
    own_BST = pooling.members(batch["segments"], batch["weights"].shape[1])
    return jnp.where(own_BST, whole_rows(mixed_BT)[:, None, :], 0).sum(2)
