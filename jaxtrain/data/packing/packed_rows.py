"""Pack documents into rows of one length, concatenated and cut, or by a best-fit plan; row i is a pure function of i.

T: the row length.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxtrain.data.corpus.corpus import Tokens
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from jaxtrain.data.packing.best_fit import Plan


class PackedRows:
    """Rows of `seq_len` tokens from concatenated documents; a document may end in one row and go on in the next.

    A row is a dict of [T] arrays: `tokens`; `targets` (the token that follows each); `segments` (1, 2, ... per document
    within the row, 0 for padding); `positions` (from 0 at each document and at each row); `weights` (0 where the target
    belongs to another document, else 1). A last row that is not full is dropped, or padded with `pad_last`: then every
    token but the first of each document is a target of weight 1 exactly once.
    """

    def __init__(self, tokens: Tokens, seq_len: int, pad_last: bool = False):
        self.tokens, self.seq_len = tokens, seq_len
        targets = tokens.num_tokens - 1  # the very first token is not a target
        self._len = -(-targets // seq_len) if pad_last else targets // seq_len
        if self._len < 1:
            raise UserError("data.source", f"{tokens.num_tokens} tokens are too short for one row of data.seq_len="
                            f"{seq_len} and its last target", "give more text or a smaller data.seq_len")

    def __len__(self) -> int:
        return self._len

    @property
    def fill(self) -> float:
        """The share of places that hold a token."""
        return min(1.0, (self.tokens.num_tokens - 1) / (self._len * self.seq_len))

    @property
    def cut(self) -> int:
        """The number of documents that do not lie in a single row."""
        count, before = 0, 0
        for shard in self.tokens.shards:
            edges = (shard.offsets + before) // self.seq_len
            # The last token of a document is only a target: it may be the first of the next row.
            lasts = (shard.offsets[1:] + before - 2) // self.seq_len
            count += int((lasts > edges[:-1]).sum())
            before += len(shard.tokens)
        return count

    def places(self, i: int) -> list[int]:
        """Return where each segment of a row begins, in the tokens of the split."""
        start, stop = i * self.seq_len, min((i + 1) * self.seq_len, self.tokens.num_tokens - 1)
        return [start, *self.tokens.starts(start + 1, stop).tolist()]

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {name: column[0] for name, column in self.take([i]).items()}

    def take(self, numbers: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Return several rows at once as [n, T] arrays."""
        T, starts_N = self.seq_len, _checked(numbers, self._len) * self.seq_len
        n, end, edges = len(starts_N), self.tokens.num_tokens, []
        tokens, targets, weights = _empty(n, T)
        weights[:] = 1
        for row, start in enumerate(starts_N.tolist()):
            stop = min(start + T + 1, end)
            text = self.tokens.stored(start, stop)
            size = len(text) - 1  # T, except in a padded last row
            tokens[row, :size], targets[row, :size] = text[:-1], text[1:]
            if size < T:  # every document ends in the end-of-document id, so the very last token is one
                tokens[row, size:] = targets[row, size:] = text[-1]
            if (trained := self.tokens.trained(start + 1, stop)) is not None:
                weights[row, :size] = trained
            # A segment begins with the row and with each document, in the row or right after it (then it is empty).
            edges += [starts_N[row: row + 1], self.tokens.starts(start + 1, stop)]
        counts_N = 1 + np.fromiter(map(len, edges[1::2]), np.int64, n)
        first_N, row_S = np.cumsum(counts_N) - counts_N, np.repeat(np.arange(n), counts_N)  # S: segments of all rows
        within_S = np.concatenate(edges) - starts_N[row_S]
        number_S = np.arange(1, len(row_S) + 1) - first_N[row_S]
        begun_S = number_S > 1
        weights[row_S[begun_S], within_S[begun_S] - 1] = 0  # the target of the token before belongs to another document
        segments, positions = _spread(number_S, within_S, row_S, n, T)
        for row in np.flatnonzero(starts_N + T >= end):
            for column in (segments, positions, weights):
                column[row, end - 1 - starts_N[row]:] = 0
        return _named(tokens, targets, segments, positions, weights)


class FittedRows:
    """Rows of a best-fit plan: whole documents where they fit, and padding (segment 0) in the rest of a row."""

    def __init__(self, tokens: Tokens, plan: "Plan", seq_len: int):
        if not len(plan):
            raise UserError("data.source", f"{tokens.num_tokens} tokens have nothing to predict", "give more text")
        self.tokens, self.plan, self.seq_len = tokens, plan, seq_len

    def __len__(self) -> int:
        return len(self.plan)

    @property
    def fill(self) -> float:
        """The share of places that hold a token."""
        return self.plan.used / (len(self) * self.seq_len)

    @property
    def cut(self) -> int:
        """The number of documents that do not lie in a single row."""
        return self.plan.cut

    def places(self, i: int) -> list[int]:
        """Return where each segment of a row begins, in the tokens of the split."""
        return self.plan.pieces(np.array([i]))[1].tolist()

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {name: column[0] for name, column in self.take([i]).items()}

    def take(self, numbers: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Return several rows at once as [n, T] arrays."""
        T, n = self.seq_len, len(numbers)
        counts_N, starts, lengths = self.plan.pieces(_checked(numbers, len(self)))
        counts_N += 1  # the rest of the row is a segment, too
        row_S = np.repeat(np.arange(n), counts_N)
        begin_N = np.cumsum(counts_N) - counts_N
        number_S = np.arange(1, len(row_S) + 1) - begin_N[row_S]
        piece_S = number_S < counts_N[row_S]
        lengths_S = np.zeros(len(row_S), np.int64)
        lengths_S[piece_S] = lengths
        within_S = np.cumsum(lengths_S) - lengths_S
        within_S -= within_S[begin_N][row_S]
        tokens, targets, weights = _empty(n, T)
        weights[:] = 1
        places = row_S[piece_S], within_S[piece_S], lengths, starts
        for row, at, length, start in zip(*(column.tolist() for column in places), strict=True):
            text = self.tokens.stored(start, start + length + 1)
            tokens[row, at: at + length], targets[row, at: at + length] = text[:-1], text[1:]
            if (trained := self.tokens.trained(start + 1, start + length + 1)) is not None:
                weights[row, at: at + length] = trained
        segments, positions = _spread(number_S, within_S, row_S, n, T)
        made = tokens, targets, segments, positions, weights
        for row, at in enumerate(within_S[~piece_S].tolist()):
            for column in made:
                column[row, at:] = 0
        return _named(*made)


def _checked(numbers: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
    for number in numbers:
        if not 0 <= number < length:
            raise IndexError(f"row {number} of {length}")
    return np.asarray(numbers, np.int64)


def _empty(n: int, T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return empty tokens, targets and weights, in one block: many small ones would be freed and cleared each time."""
    tokens, targets, weights = np.empty((3, n, T), np.int32)
    return tokens, targets, weights.view(np.float32)


def _spread(number_S: np.ndarray, within_S: np.ndarray, row_S: np.ndarray, n: int, T: int) -> list[np.ndarray]:
    """Return segments and positions of n rows, from each segment's number, start within its row, and row."""
    lengths_S = np.diff(within_S + row_S * T, append=n * T)
    segments, begins = (np.repeat(each_S.astype(np.int32), lengths_S).reshape(n, T) for each_S in (number_S, within_S))
    return [segments, np.subtract(np.arange(T, dtype=np.int32), begins, out=begins)]


def _named(*columns: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip(("tokens", "targets", "segments", "positions", "weights"), columns, strict=True))
