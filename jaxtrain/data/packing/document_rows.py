"""Unpacked rows: one document or one sequence each, padded to the length of its batch.

T: the row length.
"""

from typing import Protocol

import numpy as np

from jaxtrain.data.corpus.corpus import Tokens
from jaxtrain.data.corpus.sequences import STEPS, Sequences
from jaxtrain.data.packing.best_fit import pieces
from jaxtrain.errors import UserError


class Unpacked(Protocol):
    """The protocol of rows of different lengths: dicts of arrays, among them `weights` [T], which is 0 for padding.

    They are a Grain data source of rows without padding.
    """

    lengths: np.ndarray  # of each row

    def row(self, i: int, length: int) -> dict[str, np.ndarray]:
        """Return row `i`, padded to `length`."""
        ...

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return self.row(i, int(self.lengths[i]))


class DocumentRows(Unpacked):
    """Rows of one document each, in the columns of packed rows; documents with nothing to predict are dropped.

    With `longest`, longer documents are cut into rows of that length and a remainder, so that no token is lost.
    """

    def __init__(self, tokens: Tokens, longest: int | None = None):
        self.tokens, self.longest = tokens, longest or max(1, tokens.num_tokens)
        found = list(pieces(tokens, self.longest))
        self.starts, self.lengths = (np.concatenate([np.zeros(0, np.int64), *columns])
                                     for columns in list(zip(*found, strict=True))[:2])
        self.cut = sum(cut for *_, cut in found)

    def places(self, i: int) -> list[int]:
        """Return where the row begins, in the tokens of the split."""
        return [int(self.starts[i])]

    def find(self, start: int) -> tuple[int, int] | None:
        """Return the row that begins at this token of the split, and 0, its place there; None: none does."""
        row = int(np.searchsorted(self.starts, start))
        return (row, 0) if row < len(self.starts) and self.starts[row] == start else None

    def row(self, i: int, length: int) -> dict[str, np.ndarray]:
        """Return `tokens`, `targets`, `segments` (1, and 0 for padding), `positions` and `weights`, each [T]."""
        start, size = int(self.starts[i]), int(self.lengths[i])
        text = self.tokens.read(start, start + size + 1)
        trained = self.tokens.trained(start + 1, start + size + 1)
        row = {"tokens": text[:-1], "targets": text[1:], "segments": np.ones(size, np.int32),
               "positions": np.arange(size, dtype=np.int32),
               "weights": np.ones(size, np.float32) if trained is None else trained.astype(np.float32)}
        return {name: np.pad(column, (0, length - size)) for name, column in row.items()}


class SequenceRows(Unpacked):
    """Rows of one sequence each, padded.

    Columns with a value per step become [T, ...]; a column with its own count is padded to the longest in the data.
    `weights` [T] is 1 for each step, `NAME_weights` for each value of a column with its own count. Sequences longer
    than `longest` are an error, or are cut there with `crop`.
    """

    def __init__(self, sequences: Sequences, longest: int | None = None, crop: bool = False):
        self.sequences, self.lengths = sequences, sequences.counts()
        too_long = int((self.lengths > longest).sum()) if longest else 0
        if too_long and not crop:
            raise UserError("longest", f"{too_long:,} sequences have more than {longest} steps, the longest "
                            f"{self.lengths.max():,}", "allow for them, or give crop=True and lose their ends")
        if longest:
            self.lengths = np.minimum(self.lengths, longest)
        own = [name for name, column in sequences.columns.items() if column.per == "own"]
        self._most = {name: int(sequences.counts(name).max(initial=1)) for name in own}

    def row(self, i: int, length: int) -> dict[str, np.ndarray]:
        """Return the columns of one sequence and their weights."""
        row = {}
        for name, values in self.sequences[i].items():
            offsets = self.sequences.columns[name].offsets(name)
            if offsets is None:
                row[name] = np.array(values[0])
                continue
            of_steps = offsets == STEPS
            size, count = (length, int(self.lengths[i])) if of_steps else (self._most[name], len(values))
            row[name] = np.zeros((size, *values.shape[1:]), values.dtype)
            row[name][:count] = values[:count]
            row["weights" if of_steps else f"{name}_weights"] = (np.arange(size) < count).astype(np.float32)
        return row
