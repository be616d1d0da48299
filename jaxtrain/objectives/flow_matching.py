"""Flow matching: learn the velocity that takes noise to images along straight lines (arXiv 2210.02747, 2209.03003).

At time t of 0 to 1 an image x is (1 - t) e + t x with noise e, and its velocity x - e. Times and noise come from the
seed, the step and the row: batches have a time for each image, and for each patch a number that its noise is made of.

Shape suffixes: B rows, T patches, S images of a row, P values of a patch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.schema import TrainConfig
from jaxtrain.config.vision_keys import ImageFlowConfig
from jaxtrain.data.loading.batch_spec import SEQ, Array, Declared
from jaxtrain.objectives.contrastive import patches_spec
from jaxtrain.objectives.objective import OfTheModelAlone, of_sections, without_z_loss
from jaxtrain.parallel.cut_rows import arrange
from jaxtrain.parallel.pipeline.parts import Parts
from jaxtrain.sharding import activations
from jaxtrain.train_step import partition
from jaxtrain.train_step.state import Batch, Metrics, Params, Skeleton

if TYPE_CHECKING:
    from jaxtrain.parallel.pipeline.stage_placement import Slots

STACK = "image/encoder/blocks"


@dataclass(frozen=True)
class FlowMatching(OfTheModelAlone):
    """The mean over patches of the squared error of the velocity, a mean over a patch's values."""

    model: Skeleton
    shape: ImageFlowConfig

    @of_sections
    @classmethod
    def of(cls, skeleton: Skeleton, *, model: ImageFlowConfig, train: TrainConfig) -> "FlowMatching":
        """Return the objective that these sections of a config describe."""
        without_z_loss(model, train)
        return cls(skeleton, model)

    @property
    def batch_spec(self) -> Declared:
        """Patches and labels, the time of each image, and what each patch's noise is made of."""
        beside = (self.shape.images_per_row,)
        return {**patches_spec(self.shape), "labels": Array(np.int32, beside, below=self.shape.num_labels),
                "weights": Array(np.float32, beside), "times": Array(np.float32, beside),
                "draws": Array(np.uint32, (SEQ,))}

    @property
    def evaluation(self) -> "FlowMatching":
        """The same loss."""
        return self

    @property
    def evaluation_metrics(self) -> Sequence[str]:
        """No metric but the loss."""
        return ()

    def metrics(self, sums: dict[str, jax.Array]) -> Metrics:
        """Return the number of patches."""
        return {"patches": sums["weight"]}

    def loss(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Return the summed loss, and the number of patches."""
        return self.pipeline_parts.loss(params, batch)

    @property
    def pipeline_parts(self) -> Parts:
        """Embeddings of noisy patches, layers, and the error of the velocity."""
        def middle(params: Params, x_BTD: jax.Array, batch: Batch,
                   slots: "Mapping[str, Slots] | None") -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
            own = (slots or {}).get(STACK)
            x_BTD = self.model.merge(params).image.encoder.through(x_BTD, batch["images"], own)
            return x_BTD, jnp.zeros(()), {}

        return Parts({STACK: self.shape.num_layers}, self._prepare, lambda batch: _there(batch).sum(), self._begin,
                     middle, self._end)

    def _prepare(self, params: Params, batch: Batch) -> tuple[Params, Batch]:
        """The model's own parameters, and the batch as its devices share it."""
        patches = arrange({name: batch[name] for name in ("images", "patches", "places", "draws")})
        return partition.like(params, self.model.params()), batch | patches

    def _begin(self, params: Params, batch: Batch) -> jax.Array:
        """Embeddings of patches on their way from noise to images."""
        images_BT, times_BS = batch["images"], activations.constrain(batch["times"], "batch", None)
        own_BTS = images_BT[..., None] == jnp.arange(1, times_BS.shape[1] + 1)
        time_BT1 = (own_BTS * times_BS[:, None, :]).sum(-1)[..., None]
        image_BTP, noise_BTP = self._ends(batch)
        return self.model.merge(params).begin((1 - time_BT1) * noise_BTP + time_BT1 * image_BTP, images_BT,
                                              batch["places"], times_BS, batch["labels"])

    def _end(self, params: Params, x_BTD: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The summed squared error of the velocity."""
        image_BTP, noise_BTP = self._ends(batch)
        found_BTP = self.model.merge(params).finish(x_BTD)
        error_BT = jnp.square(found_BTP.astype(jnp.float32) - (image_BTP - noise_BTP)).mean(-1)
        return (error_BT * _there(batch)).sum(), {}

    def _ends(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The values of each patch, and its noise."""
        return batch["patches"].astype(jnp.float32) / 127.5 - 1, noise(batch["draws"], self.shape.patch_values)


def _there(batch: Batch) -> jax.Array:
    """Return 1 for each patch and 0 for padding."""
    return (batch["images"] > 0).astype(jnp.float32)


def noise(draws_BT: jax.Array, values: int) -> jax.Array:
    """Return standard normal numbers for each patch, made of its number."""
    made = jax.vmap(jax.vmap(lambda draw: jax.random.normal(jax.random.key(draw), (values,))))
    if (spec := activations.activation_spec("batch", "seq")) is None:
        return made(draws_BT)
    return activations.manual_region(made, in_specs=spec, out_specs=jax.P(*spec, None))(draws_BT)


def sample(model: Any, labels: Sequence[int], rows: int, columns: int, *, steps: int = 50, seed: int = 0) -> np.ndarray:
    """Return images of these labels, so many patches high and wide, by Euler's method: 8-bit patches [N, T, P].

    `model`: an `ImageFlow` on one device, as `run.module(state)` returns it.
    """
    count, patches = len(labels), rows * columns
    draws = np.random.Generator(np.random.Philox(seed)).integers(0, 2**32, (count, patches), np.uint32)
    places = jnp.broadcast_to(np.indices((rows, columns)).reshape(2, -1).T, (count, patches, 2))
    images, label_N1 = jnp.ones((count, patches), jnp.int32), jnp.asarray(labels, jnp.int32)[:, None]

    @jax.jit
    def go(x_NTP):
        def step(number, x_NTP):
            times_N1 = jnp.full((count, 1), number / steps, jnp.float32)
            return x_NTP + model(x_NTP, images, places, times_N1, label_N1).astype(jnp.float32) / steps
        return jax.lax.fori_loop(0, steps, step, x_NTP)

    x_NTP = go(noise(jnp.asarray(draws), model.image.embed.kernel[...].shape[0]))
    return np.asarray(jnp.clip(jnp.rint((x_NTP + 1) * 127.5), 0, 255)).astype(np.uint8)
