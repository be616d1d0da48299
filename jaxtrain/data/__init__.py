"""The data pipeline, from text to batches: source -> tokenizer -> cache -> packed rows -> batches.

    corpus = load_corpus(config.data)                              # tokenised once, memory-mapped after that
    rows = PackedRows(corpus.train, config.data.seq_len)           # documents packed into rows
    batches = Batches(rows, global_batch_size=16, seed=0)          # batches[n] is a pure function of n

    corpus = open_sequences("corpora/speech")                      # or audio and events instead of text
    rows = SequenceRows(corpus.train)                              # one sequence per row (DocumentRows: one document)
    batches = BucketedBatches(rows, buckets=[200, 800, 3000], global_batch_size=16, seed=0)

A folder that `jaxtrain prepare` made is opened as it is; smaller text is tokenised on first use.

Nothing here depends on devices: each process reads its own rows of a batch with `batches.rows(step, indices)`.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtrain.data.corpus.corpus import Corpus, Tokens
    from jaxtrain.data.corpus.open import open_corpus
    from jaxtrain.data.corpus.sequences import SequenceCorpus, Sequences, open_sequences
    from jaxtrain.data.corpus.text_cache import load_corpus
    from jaxtrain.data.corpus.text_source import Document, find_documents
    from jaxtrain.data.loading.bucketing import BucketedBatches
    from jaxtrain.data.loading.grain_datasets.batch_dataset import BatchDataset
    from jaxtrain.data.loading.grain_datasets.prefetch import prefetch
    from jaxtrain.data.loading.loader import Batches
    from jaxtrain.data.packing.document_rows import DocumentRows, SequenceRows
    from jaxtrain.data.packing.packed_rows import PackedRows
    from jaxtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer

_NAMES = {  # module: the names it provides
    "corpus.corpus": ["Corpus", "Tokens"],
    "corpus.open": ["open_corpus"],
    "corpus.sequences": ["SequenceCorpus", "Sequences", "open_sequences"],
    "corpus.text_cache": ["load_corpus"],
    "corpus.text_source": ["Document", "find_documents"],
    "loading.bucketing": ["BucketedBatches"],
    "packing.document_rows": ["DocumentRows", "SequenceRows"],
    "loading.grain_datasets.batch_dataset": ["BatchDataset"],
    "loading.grain_datasets.prefetch": ["prefetch"],
    "loading.loader": ["Batches"],
    "packing.packed_rows": ["PackedRows"],
    "tokenizers.tokenizer": ["Tokenizer", "load_tokenizer"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [  # imported on first use, so that a run imports only what it needs
    "BatchDataset", "Batches", "BucketedBatches", "Corpus", "Document", "DocumentRows", "PackedRows", "SequenceCorpus",
    "SequenceRows", "Sequences", "Tokenizer", "Tokens", "find_documents", "load_corpus", "load_tokenizer",
    "open_corpus", "open_sequences", "prefetch"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'jaxtrain.data' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"jaxtrain.data.{_HOME[name]}"), name)
    return value
