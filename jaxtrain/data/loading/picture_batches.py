"""Batches of rows of pictures, augmented; and, for flow matching, the times and the noise of each step."""

from collections.abc import Collection, Sequence

import numpy as np

from jaxtrain.data.loading.augmentation import augmented
from jaxtrain.data.loading.loader import Batches
from jaxtrain.data.packing.picture_rows import PictureRows


class PictureBatches(Batches):
    """Batches by step whose pictures are augmented anew at every step."""

    def __init__(self, rows: PictureRows, *, global_batch_size: int, seed: int, augment: Collection[str] = (),
                 noise: bool = False, repeat: bool = True, threads: int = 0):
        """`noise`: rows also have `times` of their pictures, and a number for each patch that its noise is drawn from.
        """
        super().__init__(rows, global_batch_size=global_batch_size, seed=seed, repeat=repeat, threads=threads)
        self._seed, self._augment, self._noise = seed, augment, noise

    def _read(self, step: int, within: np.ndarray | Sequence[int]) -> dict[str, np.ndarray]:
        batch = super()._read(step, np.asarray(within))
        rows = [{name: x[i] for name, x in batch.items()} for i in range(len(within))]
        for i, number in enumerate(np.asarray(within).tolist()):
            if self._augment:
                rows[i] = augmented(rows[i], self._augment, self._seed, step, number)
            if self._noise:
                random = np.random.Generator(np.random.Philox(key=[self._seed, step], counter=[number, 0, 1, 0]))
                rows[i] |= {"times": random.random(len(rows[i]["weights"]), np.float32),
                            "draws": random.integers(0, 2**32, len(rows[i]["pictures"]), np.uint32)}
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]} if rows else batch

    def shape(self, step: int) -> tuple[int, int]:
        """Return the number of rows, and of patches per row, which is the same at every step."""
        return self.global_batch_size, len(self._rows[0]["pictures"])
