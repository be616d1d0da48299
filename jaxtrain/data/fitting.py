"""Best-fit packing: which pieces of documents share a row, planned once so that few documents are cut.

Documents longer than a row are cut to rows and a rest; then the longest piece goes first, each into the row where it
leaves the least room (Ding et al. 2024, arXiv 2404.10830). A plan is a pure function of the lengths and the row length.
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.data import files
from jaxtrain.data.corpus import Tokens


@dataclass(frozen=True, eq=False)
class Plan:
    """Row r holds pieces `rows[r]` to `rows[r + 1]`; a piece is a stretch of inputs, each followed by its target."""

    rows: np.ndarray
    starts: np.ndarray  # of each piece, in the tokens of the split
    lengths: np.ndarray
    cut: int  # documents that were cut

    @property
    def fill(self) -> float:
        """The share of places that hold a token, were all rows as long as the longest."""
        return float(self.lengths.sum() / max(1, (len(self.rows) - 1) * self.lengths.max(initial=1)))


def plan(tokens: Tokens, seq_len: int) -> Plan:
    """Of all documents with at least one token to predict."""
    starts, lengths, cut = pieces(tokens, seq_len)
    longest_first = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), np.int64)
    row_of[longest_first] = _fit(lengths[longest_first].tolist(), seq_len)
    order = np.argsort(row_of, kind="stable")  # within a row in the order of the corpus
    counts = np.bincount(row_of, minlength=1) if len(row_of) else np.zeros(0, np.int64)
    return Plan(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), starts[order], lengths[order], cut)


def pieces(tokens: Tokens, seq_len: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Starts and lengths of whole rows and rests. A document's last token is a target only."""
    starts, inputs, before = [], [], 0
    for shard in tokens.shards:
        starts.append(shard.offsets[:-1] + before)
        inputs.append(np.diff(shard.offsets) - 1)
        before += len(shard.tokens)
    starts_D, inputs_D = (np.concatenate([np.zeros(0, np.int64), *parts]) for parts in (starts, inputs))
    pieces_D = -(-inputs_D // seq_len)
    first_D = np.cumsum(pieces_D) - pieces_D
    within = np.arange(pieces_D.sum()) - np.repeat(first_D, pieces_D)
    lengths = np.minimum(np.repeat(inputs_D, pieces_D) - within * seq_len, seq_len)
    return np.repeat(starts_D, pieces_D) + within * seq_len, lengths, int((pieces_D > 1).sum())


def _fit(lengths: list[int], room: int) -> list[int]:
    """The row of each piece, longest first. Rows with equal room left are a stack; a bit set says which stacks are not
    empty, so that the tightest row is the lowest bit from the piece's length on."""
    stacks: list[list[int]] = [[] for _ in range(room + 1)]
    there, rows, placed = 0, 0, []
    for length in lengths:
        fitting = there >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            row = stacks[left].pop()
            if not stacks[left]:
                there &= ~(1 << left)
        else:
            left, row, rows = room, rows, rows + 1
        placed.append(row)
        if left > length:
            stacks[left - length].append(row)
            there |= 1 << (left - length)
    return placed


def cached_plan(tokens: Tokens, seq_len: int, folder: Path, identity: str) -> Plan:
    """The plan, from `folder` if it was made before. `identity` stands for the tokens."""
    path = folder / f"{files.digest([identity, seq_len])[:32]}.npz"
    try:
        with np.load(path) as saved:
            return Plan(saved["rows"], saved["starts"], saved["lengths"], int(saved["cut"]))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        made = plan(tokens, seq_len)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with files.written(path) as file:
            np.savez(file, rows=made.rows, starts=made.starts, lengths=made.lengths, cut=made.cut)
    except OSError:
        pass  # it is planned again next time
    return made
