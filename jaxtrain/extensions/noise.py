"""The random numbers of training: dropout in adapters, NEFTune's noise on embeddings, the rounding of gradients."""

from dataclasses import dataclass

from jaxtrain.models import training_noise
from jaxtrain.run import Extension, Parts
from jaxtrain.train_step.gradients import StateGradient


@dataclass(frozen=True)
class TrainingNoise(Extension):
    """The random bits of each token, which the gradient's batch has and an evaluation's has not."""

    seed: int
    alpha: float  # of NEFTune; 0: no noise on embeddings
    width: int  # of an embedding

    @classmethod
    def of(cls, parts: Parts) -> "TrainingNoise | None":
        """Return it with the seed and the amplitude of the config; None where a precision asks that rounds none."""
        c = parts.config
        if not (c.train.precision == "nvfp4" or c.lora.dropout or c.train.neftune_noise_alpha):
            return None
        return cls(c.train.seed, c.train.neftune_noise_alpha, c.model.embed_dim)

    def around_gradient(self, gradient: StateGradient) -> StateGradient:
        """Return the gradient of batches with the bits."""
        return lambda state, batch: gradient(state, training_noise.added_to(
            batch, self.seed, state.step, self.alpha, self.width))
