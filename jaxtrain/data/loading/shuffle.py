"""Which row comes when: epoch after epoch, each another permutation of all rows, known at any place in O(1).

The permutation is Grain's, and so is the order: that of `MapDataset.source(rows).seed(seed).shuffle().repeat()`.
"""

import numpy as np

from jaxtrain.errors import UserError


class Order:
    """Without `shuffle`, every epoch is in the order of the rows. Each `era` has permutations of its own."""

    def __init__(self, length: int, seed: int, shuffle: bool = True, era: int = 0):
        if seed < 0:
            raise UserError("data.seed", f"{seed} is negative", "use 0 or more")
        if length < 1:
            raise ValueError("there are no rows to put in order")
        self.length = length
        self._permute = None
        if shuffle:
            from grain.experimental import index_shuffle  # a second's import, that only a run which reads data pays

            self._permute = index_shuffle
            # Grain mixes a pipeline's seed with the depth of what it is for: here 1, the shuffle right behind it.
            self._seed = int(np.random.SeedSequence([seed, 1 + era]).generate_state(1)[0])

    def rows(self, places: np.ndarray) -> np.ndarray:
        """The row at each place of the order, which has no end."""
        epochs, within = np.divmod(np.asarray(places, np.int64), self.length)
        if self._permute is None:
            return within
        permute, last, seed = self._permute, self.length - 1, self._seed
        return np.fromiter((permute(place, last, (seed + epoch) % 2**32, 4)  # 4 rounds: what Grain takes
                            for epoch, place in zip(epochs.tolist(), within.tolist(), strict=True)),
                           np.int64, len(within))
