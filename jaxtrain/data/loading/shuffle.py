"""The shuffled order of rows: a new permutation of all rows each epoch, computed at any place in O(1).

Permutation and order are those of Grain's `MapDataset.source(rows).seed(seed).shuffle().repeat()`, except for 2^16 + 1,
2^18 + 1, ... rows, of which Grain's (0.2.18) draws one twice and the last one never.
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


ROUNDS = 4  # as in Grain


def bound_of(last: int) -> int:
    """Return the largest number that Grain is asked to permute, for the numbers up to `last`.

    Its blocks have ceil(log2(last)) bits, rounded up to an even number of at least 16: where that is exact, one bit
    too few for `last` itself.
    """
    return last + 1 if last >= 1 << 16 and last & (last - 1) == 0 and last.bit_length() % 2 else last


def permuted(place: int, last: int, seed: int, rounds: int = ROUNDS) -> int:
    """Return the number at a place of the permutation of the numbers up to `last`."""
    permute, bound = index_shuffle(), bound_of(last)
    found = permute(place, bound, seed, rounds)
    while found > last:
        found = permute(found, bound, seed, rounds)
    return found


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
        last, seed = self.length - 1, self.seed
        permute = index_shuffle() if bound_of(last) == last else permuted
        return np.fromiter((permute(place, last, (seed + epoch) % 2**32, ROUNDS)
                            for epoch, place in zip(epochs.tolist(), within.tolist(), strict=True)),
                           np.int64, len(within))
