"""Read the text of all documents of a corpus from its tokens, in as many processes as are given.

What is searched is the text of the tokens that are trained on: after cleaning, and without special tokens.
"""

import bisect
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from jaxtrain.config.schema import DataConfig
from jaxtrain.data.corpus.corpus import Corpus
from jaxtrain.data.corpus.text_cache import load_corpus
from jaxtrain.data.prepare.engines import in_processes
from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.data.tracing.found_documents import FoundDocument, document

CHUNK = 2**22  # tokens that a process reads at a time
Hit = TypeVar("Hit", covariant=True)


@dataclass(frozen=True)
class ReadDocument:
    """A document with its tokens, without those that begin and end it, and their text."""

    document: FoundDocument
    tokens: np.ndarray
    before: int  # tokens in front of these: 1 if a token begins documents
    text: str

    def stretch(self, tokenizer: Tokenizer, start: int, stop: int) -> tuple[int, int]:
        """Return the tokens that hold bytes `start` to `stop` of the text, counted from the document's first token."""
        def ends(count: int) -> int:
            return tokenizer.count_bytes(self.tokens[:count])

        tokens = range(len(self.tokens) + 1)
        first = max(0, bisect.bisect_right(tokens, start, key=ends) - 1)
        return self.before + first, self.before + bisect.bisect_left(tokens, stop, lo=first, key=ends)


class Search(Protocol, Generic[Hit]):
    """The protocol of what looks for something in documents; it can be pickled, and hashed."""

    def search(self, documents: Sequence[ReadDocument], tokenizer: Tokenizer) -> Sequence[Hit]:
        """Return what these documents have."""
        ...


@dataclass(frozen=True)
class Chunk:
    """Consecutive documents of a shard."""

    source: str
    split: str
    shard: int
    first: int
    stop: int


def searched(data: DataConfig, corpus: Corpus, search: Search[Hit], splits: Sequence[str],
             workers: int) -> Iterator[Sequence[Hit]]:
    """Yield what the search finds in each chunk of these splits, in any order if there are several workers."""
    found = list(chunks(corpus, splits))
    if min(workers, len(found)) > 1:
        yield from in_processes(_in_worker, [(data, search, chunk) for chunk in found], min(workers, len(found)))
        return
    for chunk in found:
        yield search.search(list(read(corpus, chunk)), corpus.tokenizer)


def chunks(corpus: Corpus, splits: Sequence[str]) -> Iterator[Chunk]:
    """Yield all documents of these splits in chunks of about `CHUNK` tokens."""
    for source, part in corpus.parts.items() or [("", corpus)]:
        for split in splits:
            for number, shard in enumerate(getattr(part, split).shards):
                first, last = 0, len(shard.offsets) - 1
                while first < last:
                    stop = int(np.searchsorted(shard.offsets, shard.offsets[first] + CHUNK, "right")) - 1
                    stop = min(last, max(first + 1, stop))
                    yield Chunk(source, split, number, first, stop)
                    first = stop


def read(corpus: Corpus, chunk: Chunk) -> Iterator[ReadDocument]:
    """Yield the documents of a chunk."""
    for number in range(chunk.first, chunk.stop):
        yield read_one(corpus, document(corpus, chunk.source, chunk.split, chunk.shard, number))


def read_one(corpus: Corpus, one: FoundDocument) -> ReadDocument:
    """Return a document with its text."""
    tokens, bos = getattr(corpus.part(one.source), one.split), corpus.tokenizer.bos
    ids = tokens.read(one.start, one.stop - 1)  # without the end-of-document token
    before = int(bos is not None and len(ids) > 0 and int(ids[0]) == bos)
    return ReadDocument(one, ids[before:], before, corpus.tokenizer.decode(ids[before:]))


def _in_worker(data: DataConfig, search: Search[Hit], chunk: Chunk) -> Sequence[Hit]:
    corpus = _opened(data)
    return search.search(list(read(corpus, chunk)), corpus.tokenizer)


@functools.lru_cache(maxsize=1)
def _opened(data: DataConfig) -> Corpus:
    return load_corpus(data)
