"""The random numbers of training: dropout in adapters (`lora.dropout`) and NEFTune's noise on embeddings."""

from dataclasses import dataclass

from jaxtrain.models import training_noise
from jaxtrain.run import Extension, Parts
from jaxtrain.train_step.gradients import StateGradient


@dataclass(frozen=True)
class TrainingNoise(Extension):
    """The random bits of each token, which the gradient's batch has and an evaluation's has not."""

    seed: int
    alpha: float  # of NEFTune; 0: dropout alone
    width: int  # of an embedding

    @classmethod
    def of(cls, parts: Parts) -> "TrainingNoise":
        """Return it with the seed and the amplitude of the config."""
        c = parts.config
        return cls(c.train.seed, c.train.neftune_noise_alpha, c.model.embed_dim)

    def around_gradient(self, gradient: StateGradient) -> StateGradient:
        """Return the gradient of batches with the bits."""
        return lambda state, batch: gradient(state, training_noise.added_to(
            batch, self.seed, state.step, self.alpha, self.width))
