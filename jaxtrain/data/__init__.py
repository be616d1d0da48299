"""Text to batches: source -> tokenizer -> cache -> packed rows -> batches.

    corpus = load_corpus(config.data)                              # tokenised once, memory-mapped after that
    rows = PackedRows(corpus.train, config.data.seq_len)           # documents packed into rows
    batches = Batches(rows, global_batch_size=16, seed=0)          # batches[n] is a pure function of n

A folder that `python -m jaxtrain.data.prepare` made is opened as it is; smaller text is tokenised on first use.

Nothing here knows of devices: a process asks for its rows of a batch with `batches.rows(step, indices)`.
"""

from jaxtrain.data.cache import load_corpus
from jaxtrain.data.corpus import Corpus, Tokens, open_corpus
from jaxtrain.data.loader import Batches, prefetch
from jaxtrain.data.packing import PackedRows
from jaxtrain.data.source import Document, find_documents
from jaxtrain.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Batches", "Corpus", "Document", "PackedRows", "Tokenizer", "Tokens", "find_documents", "load_corpus",
           "load_tokenizer", "open_corpus", "prefetch"]
