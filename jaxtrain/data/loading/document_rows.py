"""Rows of their own: one document or one sequence a row, padded to whatever length its batch has.

T: the row length.
"""

from typing import Protocol

import numpy as np

from jaxtrain.data.corpus.corpus import Tokens
from jaxtrain.data.corpus.sequences import STEPS, Sequences
from jaxtrain.data.loading.best_fit import pieces
from jaxtrain.errors import UserError


class Unpacked(Protocol):
    """Rows of different lengths: dicts of arrays, among them `weights` [T], which is 0 where a row is padding."""

    @property
    def lengths(self) -> np.ndarray:
        """How long each row is."""
        ...

    def row(self, i: int, length: int) -> dict[str, np.ndarray]:
        """Row `i`, padded to `length`."""
        ...


class DocumentRows:
    """The documents that have something to predict, in the columns of packed rows.

    With `longest`, documents longer than that are cut to rows of it and a rest, so that every token is learnt.
    """

    def __init__(self, tokens: Tokens, longest: int | None = None):
        self._tokens, found = tokens, list(pieces(tokens, longest or max(1, tokens.num_tokens)))
        self.starts, self.lengths = (np.concatenate([np.zeros(0, np.int64), *columns])
                                     for columns in list(zip(*found, strict=True))[:2])
        self.cut = sum(cut for *_, cut in found)

    def places(self, i: int) -> list[int]:
        """Where the row begins, in the tokens of the split."""
        return [int(self.starts[i])]

    def row(self, i: int, length: int) -> dict[str, np.ndarray]:
        """`tokens`, `targets`, `segments` (1, and 0 for padding), `positions` and `weights`, each [T]."""
        start, size = int(self.starts[i]), int(self.lengths[i])
        text = self._tokens.read(start, start + size + 1)
        trained = self._tokens.trained(start + 1, start + size + 1)
        row = {"tokens": text[:-1], "targets": text[1:], "segments": np.ones(size, np.int32),
               "positions": np.arange(size, dtype=np.int32),
               "weights": np.ones(size, np.float32) if trained is None else trained.astype(np.float32)}
        return {name: np.pad(column, (0, length - size)) for name, column in row.items()}


class SequenceRows:
    """Sequences; a column with a value a step becomes [T, ...], one with a number of its own is as long as its longest.

    `weights` [T] is 1 for each step, and `NAME_weights` for each value of a column with a number of its own. Sequences
    longer than `longest` are an error, or end there if `crop` says so.
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
        """The columns of one sequence and their weights."""
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
