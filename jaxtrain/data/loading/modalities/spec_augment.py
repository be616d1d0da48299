"""SpecAugment (Park et al., arXiv 1904.08779): stretches of frames and ranges of bands of training rows become 0.

Which ones is a pure function of the seed, the step and the row's number in the global batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.config.modality_families import WhisperConfig
from jaxtrain.config.model_config import ModelConfig


def augmented(batches: Any, model: ModelConfig, seed: int) -> Any:
    """Return batches with the masks that a model's config asks for, or the same ones where it asks for none."""
    if isinstance(model, WhisperConfig) and (model.time_masks or model.mel_masks):
        return AugmentedBatches(batches, model, seed)
    return batches


@dataclass(frozen=True)
class AugmentedBatches:
    """A batch source whose `features` are masked."""

    batches: Any
    model: WhisperConfig
    seed: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return self.rows(step, range(self.batches.size(step)))

    def rows(self, step: int, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """Return these rows of the global batch at `step`."""
        batch = self.batches.rows(step, indices)
        features = batch["features"].copy()
        for row, frames, index in zip(features, batch["weights"].sum(1), indices, strict=True):
            self._mask(row, int(frames), np.random.RandomState(_state(self.seed, step, int(index))))
        return batch | {"features": features}

    def _mask(self, row: np.ndarray, frames: int, random: np.random.RandomState) -> None:
        c = self.model
        for count, most, size, masked in ((c.time_masks, c.time_mask, frames, row[:frames]),
                                          (c.mel_masks, c.mel_mask, c.mels, row.T)):
            for _ in range(count):
                width = random.randint(0, min(most, size) + 1)
                first = random.randint(0, size - width + 1)
                masked[first:first + width] = 0


def _state(*numbers: int) -> np.ndarray:
    return np.random.SeedSequence([*numbers, 1904]).generate_state(4)
