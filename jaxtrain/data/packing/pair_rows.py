"""Rows of whole preference pairs: the chosen and the rejected answer to a prompt, each with the prompt in front."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from jaxtrain.data.corpus.corpus import Shard, Tokens
from jaxtrain.data.packing.best_fit import Plan
from jaxtrain.data.packing.packed_rows import FittedRows
from jaxtrain.errors import UserError


class Pairs(Tokens):
    """The tokens of a split in which two consecutive documents make a pair."""

    whole: ClassVar[bool] = True

    def edges(self, shard: Shard) -> np.ndarray:
        """Return where each pair of a shard begins and the last one ends."""
        return shard.offsets[::2]


def paired(tokens: Tokens, pairs: bool) -> Pairs:
    """Return the split as pairs; `pairs`: whether the corpus says that it holds such."""
    if not pairs or any(len(shard.offsets) % 2 == 0 for shard in tokens.shards):
        raise UserError("data.packing", "the corpus does not hold preference pairs",
                        "prepare records with chosen and rejected answers (--format=preference)")
    return Pairs(tokens.shards, tokens.num_bytes)


class PairRows(FittedRows):
    """Rows of a best-fit plan of pairs: segments 2k - 1 and 2k are the two answers of the row's k-th pair."""

    def __init__(self, tokens: Pairs, plan: Plan, seq_len: int):
        if not len(plan):
            raise UserError("data.seq_len", f"none of the {plan.cut:,} pairs fits into a row of {seq_len} tokens",
                            "raise data.seq_len, and model.max_seq_len with it")
        super().__init__(tokens, plan, seq_len)

    def places(self, i: int) -> list[int]:
        """Return where each segment of a row begins, in the tokens of the split."""
        _, starts, lengths = self.plan.pieces(np.array([i]))
        return [place for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
                for place in (start, self._second(start, length))]

    def _second(self, start: int, length: int) -> int:
        """Return where the rejected answer's document begins."""
        second, = self.tokens.starts(start + 1, start + length)
        return int(second)

    def take(self, numbers: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Return several rows at once as [n, T] arrays."""
        columns = super().take(numbers)
        segments, positions, weights = (columns[name] for name in ("segments", "positions", "weights"))
        segments[segments > 0] = 2 * segments[segments > 0] - 1
        counts_N, starts, lengths = self.plan.pieces(np.asarray(numbers, np.int64))
        row_S = np.repeat(np.arange(len(numbers)), counts_N)
        at_S = np.cumsum(lengths) - lengths
        at_S -= np.repeat(at_S[np.cumsum(counts_N) - counts_N], counts_N)
        places = row_S, at_S, starts, lengths
        for row, at, start, length in zip(*(column.tolist() for column in places), strict=True):
            middle, end = at + self._second(start, length) - start, at + length
            weights[row, middle - 1] = 0  # the target of the last token is the first of the other document
            segments[row, middle:end] += 1
            positions[row, middle:end] -= middle - at
        return columns
