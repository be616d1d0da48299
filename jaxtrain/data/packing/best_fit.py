"""Best-fit packing: plan which pieces of documents share a row, so that few documents are cut.

Documents longer than a row are cut into whole rows and a remainder. Then pieces are placed from the longest to the
shortest, each into the row where it leaves the least room (Ding et al. 2024, arXiv 2404.10830). Pieces of equal length
are interchangeable, so a plan depends only on how many there are of each length: it is some thousand groups of rows
that look alike, however many documents there are. A piece is identified by its rank among those of its length.

T: the row length. G: groups. I: items, `each` pieces of one length in each row of a group. P: pieces, by length.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.data.corpus.corpus import Tokens
from jaxtrain.files import atomic_files

VERSION = 1  # of the plan; raised when the same lengths give different rows
CHUNK = 2**22  # documents processed at once, which bounds the memory


@dataclass(frozen=True, eq=False)
class Plan:
    """A packing plan: rows `rows[g]` to `rows[g + 1]` form group g and hold items `items[g]` to `items[g + 1]`.

    A piece is a stretch of inputs, each followed by its target.
    """

    rows: np.ndarray  # [G + 1]
    items: np.ndarray  # [G + 1]
    lengths: np.ndarray  # [I] length of the pieces
    each: np.ndarray  # [I] pieces in each row
    first: np.ndarray  # [I] the first piece of the group's first row; the pieces of its other rows follow
    starts: np.ndarray  # [P] start of each piece, in the tokens of the split; memory-mapped if it comes from the cache
    cut: int  # number of documents that were cut

    def __len__(self) -> int:
        return int(self.rows[-1])

    @property
    def used(self) -> int:
        """The number of places that hold a token."""
        rows_I = np.repeat(np.diff(self.rows), np.diff(self.items))
        return int((self.lengths * self.each * rows_I).sum())

    @property
    def fill(self) -> float:
        """The share of places that hold a token, if all rows are as long as the longest."""
        longest = max(np.add.reduceat(self.lengths * self.each, self.items[:-1]), default=1)
        return self.used / max(1, len(self) * longest)

    def pieces(self, numbers_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return how many pieces each of these rows has, and the starts and lengths of all of them, row by row."""
        group_N = self.rows.searchsorted(numbers_N, "right") - 1
        counts_N = self.items[group_N + 1] - self.items[group_N]
        item = _ranges(self.items[group_N], counts_N)
        each, before = self.each[item], np.repeat(numbers_N - self.rows[group_N], counts_N)
        starts = self.starts[_ranges(self.first[item] + before * each, each)]
        return np.add.reduceat(each, np.cumsum(counts_N) - counts_N), starts, np.repeat(self.lengths[item], each)

    def find(self, start: int, length: int) -> tuple[int, int] | None:
        """Return the row that has the piece which begins at `start`, and its place there; None: it is not in the plan.

        The pieces of one length are in the order of the corpus, and those of an item follow each other.
        """
        items_L = np.flatnonzero(self.lengths == length)
        items_L = items_L[np.argsort(self.first[items_L])]
        if not len(items_L):
            return None
        group_L = self.items.searchsorted(items_L, "right") - 1
        low, last = int(self.first[items_L[0]]), items_L[-1]
        stop = int(self.first[last] + self.each[last] * (self.rows[group_L[-1] + 1] - self.rows[group_L[-1]]))
        piece = low + int(np.searchsorted(self.starts[low:stop], start))
        if piece == stop or self.starts[piece] != start:
            return None
        which = int(np.searchsorted(self.first[items_L], piece, "right")) - 1
        item, group = items_L[which], group_L[which]
        row, nth = divmod(piece - int(self.first[item]), int(self.each[item]))
        before = slice(self.items[group], item)
        return int(self.rows[group]) + row, int((self.lengths[before] * self.each[before]).sum()) + nth * length


def _ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the ranges of `counts[i]` numbers from `first[i]` on, concatenated."""
    return np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)


def plan(tokens: Tokens, seq_len: int) -> Plan:
    """Return the best-fit plan for all documents that have at least one token to predict."""
    counts_T, cut = _counts(tokens, seq_len)
    starts = np.empty(counts_T.sum(), np.int64)
    _sort(tokens, counts_T, starts)
    return Plan(*_fit(counts_T), starts, cut)


def pieces(tokens: Tokens, seq_len: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yield starts and lengths of pieces, and the number of cut documents; a document's last token is only a target.

    With `tokens.whole` nothing is cut: what is longer than `seq_len` is dropped, and counted.
    """
    before = 0
    for shard in tokens.shards:
        edges = tokens.edges(shard)
        for at in range(0, len(edges) - 1, CHUNK):
            offsets = edges[at: at + CHUNK + 1]
            inputs_D = np.diff(offsets) - 1
            pieces_D = -(-inputs_D // seq_len)
            if tokens.whole:
                long = pieces_D > 1
                yield offsets[:-1][~long] + before, inputs_D[~long], int(long.sum())
                continue
            within = _ranges(np.zeros_like(pieces_D), pieces_D) * seq_len
            lengths = np.minimum(np.repeat(inputs_D, pieces_D) - within, seq_len)
            yield np.repeat(offsets[:-1] + before, pieces_D) + within, lengths, int((pieces_D > 1).sum())
        before += len(shard.tokens)


def _counts(tokens: Tokens, seq_len: int) -> tuple[np.ndarray, int]:
    """Return how many pieces there are of each length, and how many documents were cut."""
    counts_T, all_cut = np.zeros(seq_len + 1, np.int64), 0
    for _, lengths, cut in pieces(tokens, seq_len):
        counts_T += np.bincount(lengths, minlength=seq_len + 1)
        all_cut += cut
    return counts_T, all_cut


def _sort(tokens: Tokens, counts_T: np.ndarray, out: np.ndarray) -> None:
    """Write the starts of all pieces to `out`, by length; pieces of one length stay in the order of the corpus."""
    seq_len, next_T = len(counts_T) - 1, np.cumsum(counts_T) - counts_T
    for starts, lengths, _ in pieces(tokens, seq_len):
        order = np.argsort(lengths.astype(np.min_scalar_type(seq_len)), kind="stable")  # 16 bits: a radix sort
        here_T = np.bincount(lengths, minlength=seq_len + 1)
        out[np.arange(len(order)) + np.repeat(next_T - np.cumsum(here_T) + here_T, here_T)] = starts[order]
        next_T += here_T


def _fit(counts_T: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the arrays `rows`, `items`, `lengths`, `each` and `first` of the plan.

    Groups whose rows have equal room left share a stack. Bit n of `there` says that the stack of n free places is not
    empty, so the tightest fit is the lowest set bit from the length on. A row takes as many pieces of that length as
    fit, because after the first it is the tightest of all rows.
    """
    T, there = len(counts_T) - 1, 0
    stacks: list[list[tuple[int, list[tuple[int, int, int]]]]] = [[] for _ in range(T + 1)]

    def put(left: int, rows: int, items: list[tuple[int, int, int]], skip: int, *new: tuple[int, int, int]):
        nonlocal there
        if rows:
            stacks[left].append((rows, [(length, each, first + skip * each) for length, each, first in items] + [*new]))
            there |= 1 << left if left else 0

    first_T = (np.cumsum(counts_T) - counts_T).tolist()
    for length in np.flatnonzero(counts_T)[::-1].tolist():
        first, count = first_T[length], int(counts_T[length])
        while count:
            if fitting := there >> length:
                left = length + (fitting & -fitting).bit_length() - 1
                rows, items = stacks[left].pop()
                if not stacks[left]:
                    there &= ~(1 << left)
            else:
                left, rows, items = T, -(-count // (T // length)), []
            each = left // length
            full = min(rows, count // each)
            put(left - each * length, full, items, 0, (length, each, first))
            first, count, rows = first + full * each, count - full * each, rows - full
            if rows and count:  # not enough for another whole row
                put(left - count * length, 1, items, full, (length, count, first))
                full, rows, count = full + 1, rows - 1, 0
            put(left, rows, items, full)
    groups = [group for stack in stacks for group in stack]
    items = np.array([item for _, items in groups for item in items], np.int64).reshape(-1, 3)
    a, b, c = np.ascontiguousarray(items.T)
    return np.cumsum([0, *(rows for rows, _ in groups)]), np.cumsum([0, *(len(items) for _, items in groups)]), a, b, c


def cached_plan(tokens: Tokens, seq_len: int, folder: Path, identity: str) -> Plan:
    """Return the plan, from the cache in `folder` if it was made before; `identity` identifies the tokens."""
    path = folder / f"{atomic_files.digest([VERSION, identity, seq_len])[:32]}.plan"
    try:
        return _open(path)
    except (OSError, ValueError, EOFError):
        pass
    try:
        folder.mkdir(parents=True, exist_ok=True)
        counts_T, cut = _counts(tokens, seq_len)
        with atomic_files.written(path) as file:
            for array in (*_fit(counts_T), np.array([cut, counts_T.sum()])):
                np.save(file, array)
            at = file.tell()
            file.flush()
            # On a full disk this raises, whereas writing to the map would kill the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, at + 8 * max(1, int(counts_T.sum())))
            _sort(tokens, counts_T, np.memmap(file.name, np.int64, "r+", at))
        return _open(path)
    except OSError:
        return plan(tokens, seq_len)  # without the cache, to be planned again next time


def _open(path: Path) -> Plan:
    with open(path, "rb") as file:
        rows, items, lengths, each, first, (cut, pieces) = (np.load(file) for _ in range(6))
        starts = np.asarray(np.memmap(path, np.int64, "r", file.tell(), (int(pieces),)))
        return Plan(rows, items, lengths, each, first, starts, int(cut))
