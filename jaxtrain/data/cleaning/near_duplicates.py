"""Find near-duplicate documents by MinHash over word shingles, with candidates from signature bands (LSH).

Broder (1997), "On the resemblance and containment of documents"; Leskovec et al., "Mining of Massive Datasets", 3. A
candidate counts only if the whole signature agrees, so that chance matches in one band remove nothing.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.formats.inputs import Ids, Text, extra
from jaxtrain.errors import UserError

SEED = 1  # of the permutations
CHUNK = 2**18  # pairs that are compared at a time


@dataclass(frozen=True)
class Near:
    """The settings of near-duplicate detection: the similarity threshold and the size of signatures."""

    threshold: float = 0.8  # Jaccard similarity of their sets of shingles
    permutations: int = 128
    shingle: int = 5  # words

    def __post_init__(self):
        if not 0.3 <= self.threshold < 1:
            raise UserError("--near_threshold", f"{self.threshold} is not between 0.3 and 1", "try 0.8")
        if not 16 <= self.permutations <= 1024:
            raise UserError("--near_permutations", f"{self.permutations} is not from 16 to 1024", "try 128")
        if self.shingle < 1:
            raise UserError("--near_shingle", f"{self.shingle} is too small", "try 5")

    @property
    def rows(self) -> int:
        """The number of rows in a band: the most that still find nine in ten pairs at the threshold."""
        return max((rows for rows in range(1, self.permutations + 1)
                    if 1 - (1 - self.threshold**rows) ** (self.permutations // rows) >= 0.9), default=1)

    @property
    def bands(self) -> int:
        """The number of bands in a signature."""
        return self.permutations // self.rows

    def identity(self) -> JsonObject:
        """Return everything that determines which documents are near duplicates."""
        return asdict(self) | {"rensa": _minhash().ALGORITHM_VERSION}

    def signature(self, document: Text | Ids) -> bytes:
        """Return the MinHash signature of a document, as the bytes of uint32 values."""
        if isinstance(document, Ids):
            words = [str(i) for i in document.ids.tolist()]
        else:
            words = document.content.decode().lower().split()
        shingles = zip(*(words[i:] for i in range(self.shingle)), strict=False)
        minhash = _minhash()(self.permutations, SEED)
        minhash.update(list(map(" ".join, shingles)) if len(words) >= self.shingle else [" ".join(words)])
        return np.array(minhash.digest(), "<u4").tobytes()

    def columns(self, signatures: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Return band keys [bands, documents] of 8 bytes and marks [documents, permutations] of one byte."""
        table = np.frombuffer(signatures, "<u4").reshape(-1, self.permutations)
        keys = np.zeros((self.bands, len(table)), "<u8")
        for row in range(self.rows):
            keys ^= table[:, row: self.rows * self.bands: self.rows].T
            keys *= np.uint64(0x9E3779B97F4A7C15)
            keys ^= keys >> np.uint64(29)
        return keys, table.astype(np.uint8)

    def firsts(self, count: int, band: Callable[[int], np.ndarray],
               marks: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return, for each of `count` documents, the first one that it resembles, directly or through others.

        `band` and `marks` read their data on demand, one band at a time.
        """
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        first = np.arange(count)
        for number in range(self.bands):
            keys = band(number)
            order = np.argsort(keys, kind="stable")
            keys = keys[order]
            same = np.flatnonzero(keys[1:] == keys[:-1])
            left, right = order[same], order[same + 1]
            apart = first[left] != first[right]
            left, right = left[apart], right[apart]
            alike = np.concatenate([np.zeros(0, bool), *(
                self._alike(marks(left[i: i + CHUNK]), marks(right[i: i + CHUNK]))
                for i in range(0, len(left), CHUNK))])
            left, right = first[left[alike]], first[right[alike]]
            if len(left):
                graph = coo_array((np.ones(len(left), bool), (left, right)), (count, count))
                components = connected_components(graph, directed=False)[1]
                earliest = np.full(components.max() + 1, count)
                np.minimum.at(earliest, components, np.arange(count))
                first = earliest[components[first]]
        return first

    def _alike(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        share = (left == right).mean(axis=1)
        return (share - 1 / 256) / (1 - 1 / 256) >= self.threshold  # bytes are equal by chance once in 256


def _minhash() -> Any:
    return extra("rensa", "--deduplicate=near", "--deduplicate", "governance").RMinHash
