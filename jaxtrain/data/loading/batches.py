"""The batches that a config asks for: what a run trains and is evaluated on, and what `inspect` shows."""

import functools
from typing import TYPE_CHECKING, Any

from jaxtrain.config import data_stages
from jaxtrain.config.schema import DataConfig
from jaxtrain.data.corpus.corpus import Corpus
from jaxtrain.data.corpus.text_cache import cache_root
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.best_fit import cached_plan
from jaxtrain.data.loading.loader import Batches
from jaxtrain.data.loading.packing import FittedRows, PackedRows
from jaxtrain.errors import UserError

if TYPE_CHECKING:  # imported where a config asks for them
    from jaxtrain.data.corpus.corruption import SparedRows
    from jaxtrain.data.loading.document_rows import DocumentRows

MULTIPLE = 64  # that the lengths of chosen buckets are of, if rows are long: most meshes cut that evenly


def train_batches(config: DataConfig, corpus: Corpus) -> BatchSource:
    """By step: shuffled, reshuffled each epoch, without end unless the sources have one."""
    if config.packing == "bucket":
        from jaxtrain.data.loading.bucketing import BucketedBatches

        documents, lengths = _bucketed(config, corpus)
        return BucketedBatches(documents, buckets=lengths, global_batch_size=config.global_batch_size,
                               seed=config.seed, threads=corpus.threads)
    if not config.mixture and not config.stages:
        return Batches(rows(config, corpus, "train"), global_batch_size=config.global_batch_size, seed=config.seed,
                       threads=corpus.threads)
    from jaxtrain.data.loading.curriculum import Curriculum

    @functools.cache
    def make(name: str, seq_len: int) -> Any:
        try:
            return rows(config, corpus.part(name), "train", seq_len)
        except UserError as error:
            raise UserError(f"data.mixture.{name}" if name else error.key, error.reason, error.fix) from error

    return Curriculum(data_stages.sources(config), data_stages.stages(config), make, config.seed, corpus.threads)


def eval_batches(config: DataConfig, corpus: Corpus) -> Batches | None:
    """Every token of the evaluation split once, shuffled so that the first batches are a fair part; None: of none."""
    if corpus.eval.num_tokens <= corpus.eval.num_documents:
        return None
    return Batches(rows(config, corpus, "eval"), global_batch_size=config.global_batch_size, seed=0, repeat=False,
                   threads=corpus.threads)


def rows(config: DataConfig, corpus: Corpus, split: str, seq_len: int = 0) -> "PackedRows | FittedRows | SparedRows":
    """The split in rows of `seq_len` tokens (0: `data.seq_len`), as `data.packing` says.

    Those that are corrupt are refused or empty, as `data.corrupt` says.
    """
    seq_len = seq_len or config.seq_len
    packed = _packed(config, corpus, split, seq_len)
    if config.corrupt == "fail":
        return packed
    from jaxtrain.data.corpus.corruption import SparedRows

    return SparedRows(packed, seq_len, corpus.tokenizer.eod)


def _packed(config: DataConfig, corpus: Corpus, split: str, seq_len: int) -> PackedRows | FittedRows:
    tokens: Any = getattr(corpus, split)
    # What is in buckets is evaluated in packed rows: no document sees another there either.
    if config.packing == "concat":
        return PackedRows(tokens, seq_len, pad_last=split == "eval")
    plan = cached_plan(tokens, seq_len, cache_root(config) / "plans", f"{corpus.manifest_hash} {split}")
    return FittedRows(tokens, plan, seq_len)


@functools.lru_cache(maxsize=1)  # for the batches, and for what is said of them
def _bucketed(config: DataConfig, corpus: Corpus) -> "tuple[DocumentRows | SparedRows, tuple[int, ...]]":
    """A document a row, at most `data.seq_len` long, and the buckets' lengths: those given, or eight that pad least."""
    from jaxtrain.data.loading.bucketing import choose
    from jaxtrain.data.loading.document_rows import DocumentRows

    documents: Any = DocumentRows(corpus.train, config.seq_len)
    if config.corrupt != "fail":
        from jaxtrain.data.corpus.corruption import SparedRows

        documents = SparedRows(documents, config.seq_len, corpus.tokenizer.eod)
    if not len(documents.lengths):
        raise UserError("data.source", "it has no document with anything to predict", "give more text")
    if not config.buckets:
        chosen = choose(documents.lengths, 8, MULTIPLE if config.seq_len >= 8 * MULTIPLE else 8)
        return documents, tuple(dict.fromkeys(min(length, config.seq_len) for length in chosen))
    if documents.lengths.max() > max(config.buckets):
        raise UserError("data.buckets", f"the longest is {max(config.buckets)} and rows have up to "
                        f"{documents.lengths.max()} tokens", "add data.seq_len to them")
    return documents, tuple(config.buckets)


def packing(config: DataConfig, corpus: Corpus) -> str:
    """How full the rows of the training split are and how many documents are cut, in words."""
    if config.packing == "bucket":
        from jaxtrain.data.loading.bucketing import padding

        documents, lengths = _bucketed(config, corpus)
        full = 1 - padding(documents.lengths, lengths)
        return (f"bucket: rows of {', '.join(map(str, lengths))} are {full:.2%} full, "
                f"{documents.cut:,} of {corpus.train.num_documents:,} documents are cut")
    full, cut, documents = [], 0, 0
    for name in corpus.manifests:
        part = corpus.part(name)
        made = _packed(config, part, "train", config.seq_len)
        full.append((made.fill, len(made)))
        cut += made.cut
        documents += part.train.num_documents
    fill = sum(share * count for share, count in full) / sum(count for _, count in full)
    return f"{config.packing}: rows are {fill:.2%} full, {cut:,} of {documents:,} documents are cut"


def epochs(batches: BatchSource, steps: int) -> str:
    """How often each source is gone through in so many steps, in words."""
    return ", ".join(f"{count:.3g} epochs" + (f" of {name}" if name else "")
                     for name, count in batches.epochs(steps).items())
