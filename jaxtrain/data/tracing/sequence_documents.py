"""Prepared sequences as documents that can be traced: a clip, an image or the events of a user is one token each."""

from collections.abc import Iterator

import numpy as np

from jaxtrain.data.corpus.corpus import Corpus, Shard, Tokens
from jaxtrain.data.corpus.sequences import SequenceCorpus, Sequences
from jaxtrain.data.loading.modalities.sequence_batches import DeclaredRows
from jaxtrain.data.packing.image_rows import ImageRows
from jaxtrain.data.tokenizers.tokenizer import ByteTokenizer
from jaxtrain.data.tracing.stretches import Span, Stretch
from jaxtrain.errors import UserError


def as_documents(corpus: SequenceCorpus) -> Corpus:
    """Return a corpus whose document i is the one token i, which stands for sequence i; nothing reads its text."""
    return Corpus(_split(corpus.train), _split(corpus.eval), ByteTokenizer(), corpus.manifest_hash, corpus.path)


def _split(sequences: Sequences) -> Tokens:
    sizes = [len(shard.lengths) for shard in sequences.shards]
    return Tokens(tuple(Shard(np.broadcast_to(np.uint8(0), size), np.arange(size + 1)) for size in sizes), 0)


def sequence_spans(rows: object, stretch: Stretch) -> Iterator[Span]:
    """Yield where rows of sequences have those that a stretch stands for: positions are steps or patches."""
    for number in range(stretch.start, stretch.stop):
        if isinstance(rows, DeclaredRows):
            yield Span(number, 0, int(rows.lengths[number]), number)
        elif isinstance(rows, ImageRows):
            row = int(rows.row_of[number])
            before = rows.rows[row][:rows.rows[row].index(number)]
            begin = int(rows.lengths[before].sum())
            yield Span(row, begin, begin + int(rows.lengths[number]), number)
        else:
            raise UserError("data", f"rows of {type(rows).__name__} cannot be inverted", "trace a run on a corpus")
