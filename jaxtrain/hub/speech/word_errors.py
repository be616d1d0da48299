"""Word error rate: the fewest words to replace, leave out and add, over the words of the reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class WordErrors:
    """Counts over one transcript or many."""

    substituted: int = 0
    deleted: int = 0
    inserted: int = 0
    words: int = 0  # of the reference

    def __add__(self, other: "WordErrors") -> "WordErrors":
        return WordErrors(self.substituted + other.substituted, self.deleted + other.deleted,
                          self.inserted + other.inserted, self.words + other.words)

    @property
    def rate(self) -> float:
        """The word error rate; it may exceed 1."""
        return (self.substituted + self.deleted + self.inserted) / max(self.words, 1)


def count(references: Sequence[str], transcripts: Sequence[str],
          normalized: Callable[[str], str] = lambda text: text) -> WordErrors:
    """Return the errors of transcripts, both sides normalized first."""
    pairs = zip(references, transcripts, strict=True)
    return sum((between(normalized(right).split(), normalized(found).split()) for right, found in pairs), WordErrors())


def between(reference: Sequence[str], found: Sequence[str]) -> WordErrors:
    """Return the errors of one transcript, from the fewest edits; a substitution is preferred to two other edits."""
    edits = np.zeros((len(reference) + 1, len(found) + 1), np.int64)
    edits[:, 0], edits[0] = np.arange(len(reference) + 1), np.arange(len(found) + 1)
    for i, word in enumerate(reference):
        for j, other in enumerate(found):
            edits[i + 1, j + 1] = min(edits[i, j] + (word != other), edits[i, j + 1] + 1, edits[i + 1, j] + 1)
    i, j, substituted, deleted, inserted = len(reference), len(found), 0, 0, 0
    while i or j:
        if i and j and edits[i, j] == edits[i - 1, j - 1] + (reference[i - 1] != found[j - 1]):
            substituted += reference[i - 1] != found[j - 1]
            i, j = i - 1, j - 1
        elif i and edits[i, j] == edits[i - 1, j] + 1:
            i, deleted = i - 1, deleted + 1
        else:
            j, inserted = j - 1, inserted + 1
    return WordErrors(substituted, deleted, inserted, len(reference))
