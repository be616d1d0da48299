"""The shuffled order of rows: a new permutation of all rows each epoch, computed at any place in O(1).

Permutation and order are those of Grain's `MapDataset.source(rows).seed(seed).shuffle().repeat()`.
"""

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder

import numpy as np

from jaxtrain.errors import UserError


def index_shuffle() -> Callable[..., int]:
    """Return Grain's permutation of whole numbers; the rest of Grain, which takes long to import, is left alone."""
    name = "grain._src.python.experimental.index_shuffle.python.index_shuffle_module"
    if name not in sys.modules and (package := importlib.util.find_spec("grain")) and package.origin:
        spec = PathFinder.find_spec(name, [package.origin.replace("__init__.py", "/".join(name.split(".")[1:-1]))])
        if spec and spec.loader:
            sys.modules[name] = importlib.util.module_from_spec(spec)  # Grain's own import finds it: two would crash
            spec.loader.exec_module(sys.modules[name])
    if name not in sys.modules:
        return importlib.import_module("grain.experimental").index_shuffle
    return sys.modules[name].index_shuffle


class Order:
    """The endless order of rows; without `shuffle` epochs are in row order, and each `era` has its own permutations."""

    def __init__(self, length: int, seed: int, shuffle: bool = True, era: int = 0):
        if seed < 0:
            raise UserError("data.seed", f"{seed} is negative", "use 0 or more")
        if length < 1:
            raise ValueError("there are no rows to shuffle")
        self.length = length
        self.shuffled = shuffle
        if shuffle:
            # Grain mixes a pipeline's seed with the depth of the operation: here 1, a shuffle right after the source.
            self.seed = int(np.random.SeedSequence([seed, 1 + era]).generate_state(1)[0])

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Return the row at each place of the endless order."""
        epochs, within = np.divmod(np.asarray(places, np.int64), self.length)
        if not self.shuffled:
            return within
        permute, last, seed = index_shuffle(), self.length - 1, self.seed
        return np.fromiter((permute(place, last, (seed + epoch) % 2**32, 4)  # 4 rounds, as in Grain
                            for epoch, place in zip(epochs.tolist(), within.tolist(), strict=True)),
                           np.int64, len(within))
