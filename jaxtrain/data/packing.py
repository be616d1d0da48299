"""Documents packed into rows of one length: concatenated and chopped, or by a plan. Row i is a pure function of i.

T: the row length.
"""

import numpy as np

from jaxtrain.data.corpus import Tokens
from jaxtrain.data.fitting import Plan
from jaxtrain.errors import UserError


class PackedRows:
    """Random access to rows of `seq_len` tokens; a document may end in one row and go on in the next.

    A row is a dict of [T] arrays: `tokens`; `targets` (the token that follows each); `segments` (1, 2, ... per document
    within the row, 0 for padding); `positions` (from 0 at each document and at each row); `weights` (0 where the target
    belongs to another document, else 1). A last row that is not full is dropped, or padded with `pad_last`: then every
    token but the first of each document is a target of weight 1 exactly once.
    """

    def __init__(self, tokens: Tokens, seq_len: int, pad_last: bool = False):
        self._tokens, self._T = tokens, seq_len
        targets = tokens.num_tokens - 1  # the very first token follows nothing
        self._len = -(-targets // seq_len) if pad_last else targets // seq_len
        if self._len < 1:
            raise UserError("data.source", f"{tokens.num_tokens} tokens are too short for one row of data.seq_len="
                            f"{seq_len} and its last target", "give more text or a smaller data.seq_len")

    def __len__(self) -> int:
        return self._len

    @property
    def fill(self) -> float:
        """The share of places that hold a token."""
        return min(1.0, (self._tokens.num_tokens - 1) / (self._len * self._T))

    @property
    def cut(self) -> int:
        """Documents of which not all is in one row."""
        count, before = 0, 0
        for shard in self._tokens.shards:
            edges = (shard.offsets + before) // self._T
            # The last token of a document is a target only: it may be the first of the next row.
            lasts = (shard.offsets[1:] + before - 2) // self._T
            count += int((lasts > edges[:-1]).sum())
            before += len(shard.tokens)
        return count

    def places(self, i: int) -> list[int]:
        """Where each of its segments begins, in the tokens of the split."""
        start, stop = i * self._T, min((i + 1) * self._T, self._tokens.num_tokens - 1)
        return [start, *self._tokens.starts(start + 1, stop).tolist()]

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < self._len:
            raise IndexError(f"row {i} of {self._len}")
        start = i * self._T
        text = self._tokens.read(start, start + self._T + 1)
        size = len(text) - 1  # T, but for a padded last row
        # Where documents begin inside the row or right behind it: the token before each has a foreign target.
        begins = self._tokens.starts(start + 1, start + size + 1) - start
        weights = np.ones(size, np.float32)
        weights[begins - 1] = 0
        if (trained := self._tokens.trained(start + 1, start + size + 1)) is not None:
            weights[~trained] = 0
        edges = np.concatenate([[0], begins[begins < size], [size]]).astype(np.int32)
        lengths = np.diff(edges)
        segments = np.repeat(np.arange(1, len(edges), dtype=np.int32), lengths)
        positions = np.arange(size, dtype=np.int32) - np.repeat(edges[:-1], lengths)
        row = {"tokens": text[:-1], "targets": text[1:], "segments": segments, "positions": positions,
               "weights": weights}
        return row if size == self._T else {name: self._pad(name, column) for name, column in row.items()}

    def _pad(self, name: str, column: np.ndarray) -> np.ndarray:
        # Every document ends in the end-of-document id, so the very last token is one.
        end = self._tokens.num_tokens
        fill = self._tokens.read(end - 1, end)[0] if name in ("tokens", "targets") else 0
        return np.pad(column, (0, self._T - len(column)), constant_values=fill)


class FittedRows:
    """Random access to rows of a plan: whole documents where they fit, padding (segment 0) where a row is not full."""

    def __init__(self, tokens: Tokens, plan: Plan, seq_len: int):
        if len(plan.rows) < 2:
            raise UserError("data.source", f"{tokens.num_tokens} tokens have nothing to predict", "give more text")
        self._tokens, self._plan, self._T = tokens, plan, seq_len

    def __len__(self) -> int:
        return len(self._plan.rows) - 1

    @property
    def fill(self) -> float:
        """The share of places that hold a token."""
        return float(self._plan.lengths.sum() / (len(self) * self._T))

    @property
    def cut(self) -> int:
        """Documents of which not all is in one row."""
        return self._plan.cut

    def places(self, i: int) -> list[int]:
        """Where each of its segments begins, in the tokens of the split."""
        return self._plan.starts[slice(*self._plan.rows[i: i + 2])].tolist()

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        pieces = slice(*self._plan.rows[i: i + 2])
        lengths = self._plan.lengths[pieces]
        row: dict[str, np.ndarray] = {
            name: np.zeros(self._T, np.float32 if name == "weights" else np.int32)
            for name in ("tokens", "targets", "segments", "positions", "weights")}
        at = 0
        for segment, (start, length) in enumerate(zip(self._plan.starts[pieces], lengths, strict=True), start=1):
            text, place = self._tokens.read(int(start), int(start) + int(length) + 1), slice(at, at + int(length))
            row["tokens"][place], row["targets"][place] = text[:-1], text[1:]
            row["segments"][place], row["positions"][place] = segment, np.arange(length)
            trained = self._tokens.trained(int(start) + 1, int(start) + int(length) + 1)
            row["weights"][place] = 1 if trained is None else trained
            at += int(length)
        return row
