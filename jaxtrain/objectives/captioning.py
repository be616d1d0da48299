"""Next-token prediction of the texts among images."""

from dataclasses import dataclass

import jax

from jaxtrain.config.schema import DataConfig, TrainConfig
from jaxtrain.data.loading.batch_spec import Declared
from jaxtrain.models.vision.connector import embedded
from jaxtrain.models.vision_language import VisionLanguageConfig
from jaxtrain.objectives.contrastive import patches_spec
from jaxtrain.objectives.next_token import NextToken
from jaxtrain.objectives.objective import of_sections
from jaxtrain.train_step.state import Batch, Params, Skeleton


@dataclass(frozen=True, kw_only=True)
class Captioning(NextToken):
    """The mean over tokens of texts of the cross-entropy, given the patches and tokens before."""

    shape: VisionLanguageConfig

    @of_sections
    @classmethod
    def of(cls, skeleton: Skeleton, *, model: VisionLanguageConfig, train: TrainConfig,
           data: DataConfig) -> "Captioning":
        """Return the objective that these sections of a config describe."""
        return cls(**vars(NextToken.of(skeleton, model=model, train=train, data=data)), shape=model)

    @property
    def batch_spec(self) -> Declared:
        """The arrays of next-token prediction, and the patches in the places of tokens."""
        return {**super().batch_spec, **patches_spec(self.shape)}

    def begin(self, params: Params, batch: Batch) -> jax.Array:
        """Embeddings of tokens and patches."""
        return embedded(self.model.merge(params), batch)
