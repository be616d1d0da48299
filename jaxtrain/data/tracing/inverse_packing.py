"""The inverse of packing: which rows hold a stretch of tokens, and where, found by searching the index of the rows.

A position of a row holds a token if that is its input, or its target with a loss. So the last token of a document is
not held by rows that end with the document, in which it is a target of the position before.
"""

from collections.abc import Iterator

import numpy as np

from jaxtrain.data.corpus.corpus import Tokens
from jaxtrain.data.corpus.corruption import SparedRows
from jaxtrain.data.packing.document_rows import DocumentRows
from jaxtrain.data.packing.packed_rows import FittedRows, PackedRows
from jaxtrain.data.tracing.sequence_documents import sequence_spans
from jaxtrain.data.tracing.stretches import Span, Stretch


def spans(rows: object, stretch: Stretch) -> Iterator[Span]:
    """Yield where rows hold a stretch: all positions with one of its tokens as the input or, with a loss, the target.

    Tokens that no row holds are left out: the rest of a split that does not fill a row, and what does not fit.
    """
    rows = rows.rows if isinstance(rows, SparedRows) else rows
    if not isinstance(rows, PackedRows | FittedRows | DocumentRows):
        return sequence_spans(rows, stretch)
    begins, ends = document_at(rows.tokens, stretch.start)
    trained = rows.tokens.trained(stretch.start, stretch.start + 1)
    # The position before a token has it as its target, unless it belongs to another document.
    first = max(begins, stretch.start - 1) if trained is None or trained[0] else stretch.start
    if isinstance(rows, PackedRows):
        return _concatenated(rows, first, stretch.stop)
    return _in_pieces(rows, first, stretch.stop, *_whole(rows.tokens, begins, ends))


def document_at(tokens: Tokens, place: int) -> tuple[int, int]:
    """Return where the document with the token at `place` begins and ends, in the tokens of the split."""
    shard, number = tokens.document(place)
    before = tokens.shard_start(shard)
    begins, ends = tokens.shards[shard].offsets[number: number + 2]
    return before + int(begins), before + int(ends)


def _concatenated(rows: PackedRows, first: int, stop: int) -> Iterator[Span]:
    T = rows.seq_len
    stop = min(stop, len(rows) * T)
    while first < stop:
        row, begin = divmod(first, T)
        end = min(stop - row * T, T)
        yield Span(row, begin, end, first)
        first = row * T + end


def _whole(tokens: Tokens, begins: int, ends: int) -> tuple[int, int]:
    """Return the edges of what packing takes as one: the document, or the pair that it belongs to."""
    shard, _ = tokens.document(begins)
    before, edges = tokens.shard_start(shard), tokens.edges(tokens.shards[shard])
    number = int(np.searchsorted(edges, begins - before, "right")) - 1
    return before + int(edges[number]), before + int(edges[number + 1])


def _in_pieces(rows: FittedRows | DocumentRows, first: int, stop: int, begins: int, ends: int) -> Iterator[Span]:
    """Yield the spans of a document, or of a pair, that is cut into pieces; its last token is only a target."""
    stop, longest = min(stop, ends - 1), rows.seq_len if isinstance(rows, FittedRows) else rows.longest
    for start in range(begins + (first - begins) // longest * longest, stop, longest):
        length = min(longest, ends - 1 - start)
        if found := rows.plan.find(start, length) if isinstance(rows, FittedRows) else rows.find(start):
            a, b = max(first, start), min(stop, start + length)
            row, place = found
            yield Span(row, place + a - start, place + b - start, a)
