"""Build the batches that a config describes, for training, evaluation and `inspect`."""

import functools
from typing import TYPE_CHECKING, Any

from jaxtrain.config import data_stages
from jaxtrain.config.schema import DataConfig
from jaxtrain.data.corpus.corpus import Corpus
from jaxtrain.data.corpus.text_cache import cache_root
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.loader import Batches
from jaxtrain.data.packing.packed_rows import FittedRows, PackedRows
from jaxtrain.errors import UserError

if TYPE_CHECKING:  # imported only if a config needs them
    from jaxtrain.data.corpus.corruption import SparedRows


def train_batches(config: DataConfig, corpus: Corpus) -> BatchSource:
    """Return the training batches by step: reshuffled each epoch, and endless unless the sources are limited."""
    _refuse_without_training_text(corpus)
    parts = corpus.parts.values() or [corpus]
    if config.packing not in ("pairs", "answers") and any(part.pairs or part.labelled for part in parts):
        raise UserError("data.packing", f"the corpus holds preferences, and {config.packing} would have rejected "
                        "answers learnt too", "set data.packing=pairs, or answers, and preference.loss")
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

    trained = [source for source in data_stages.sources(config) if _trains(corpus.part(source.name))]
    return Curriculum(trained, data_stages.stages(config), make, config.seed, corpus.threads)


def _trains(corpus: Corpus) -> bool:
    return corpus.train.num_tokens > 0


def _refuse_without_training_text(corpus: Corpus) -> None:
    if not any(map(_trains, corpus.parts.values() or [corpus])):
        raise UserError("data.mixture" if corpus.parts else "data.source", "it has evaluation text, and none to train "
                        "on", "put it into data.mixture together with a corpus to train on")


def eval_batches(config: DataConfig, corpus: Corpus) -> Batches | None:
    """Return batches with every token of the eval split once, shuffled so that the first ones are a fair sample.

    Returns None if the split has no tokens to predict.
    """
    if corpus.eval.num_tokens <= corpus.eval.num_documents:
        return None
    return Batches(rows(config, corpus, "eval"), global_batch_size=config.global_batch_size, seed=0, repeat=False,
                   threads=corpus.threads)


def rows(config: DataConfig, corpus: Corpus, split: str, seq_len: int = 0) -> "PackedRows | FittedRows | SparedRows":
    """Return a split as rows of `seq_len` tokens (0: `data.seq_len`), packed as `data.packing` says.

    With `data.corrupt=skip_and_count`, corrupt rows are replaced by empty ones; otherwise they are an error.
    """
    seq_len = seq_len or config.seq_len
    packed = _packed(config, corpus, split, seq_len)
    if config.corrupt == "fail":
        return packed
    from jaxtrain.data.corpus.corruption import SparedRows

    return SparedRows(packed, seq_len, corpus.tokenizer.eod)


def _packed(config: DataConfig, corpus: Corpus, split: str, seq_len: int) -> PackedRows | FittedRows:
    tokens: Any = getattr(corpus, split)
    # Evaluation of bucketed data uses packed rows: documents cannot attend to each other there either.
    if config.packing == "concat":
        return PackedRows(tokens, seq_len, pad_last=split == "eval")
    identity, form = f"{corpus.manifest_hash} {split}", FittedRows
    if config.packing in ("pairs", "answers"):
        from jaxtrain.data.packing.answer_rows import whole_rows

        (tokens, form), identity = whole_rows(config.packing, tokens, corpus), f"{identity} {config.packing}"
    from jaxtrain.data.packing.best_fit import cached_plan

    return form(tokens, cached_plan(tokens, seq_len, cache_root(config) / "plans", identity), seq_len)


@functools.lru_cache(maxsize=1)  # used by the batches and by their summary
def _bucketed(config: DataConfig, corpus: Corpus) -> tuple[Any, tuple[int, ...]]:
    """Return rows of one document each, at most `data.seq_len` long, and the bucket lengths.

    The lengths are `data.buckets`, or else the eight that need the least padding.
    """
    from jaxtrain.data.loading.bucketing import bucket_lengths
    from jaxtrain.data.packing.document_rows import DocumentRows

    documents: Any = DocumentRows(corpus.train, config.seq_len)
    if config.corrupt != "fail":
        from jaxtrain.data.corpus.corruption import SparedRows

        documents = SparedRows(documents, config.seq_len, corpus.tokenizer.eod)
    if not len(documents.lengths):
        raise UserError("data.source", "it has no document with anything to predict", "give more text")
    return documents, bucket_lengths(config, documents.lengths, "tokens")


def packing(config: DataConfig, corpus: Corpus) -> str:
    """Return for the log how the documents of the train split become rows."""
    if config.packing == "bucket":
        from jaxtrain.data.loading.bucketing import padding

        documents, lengths = _bucketed(config, corpus)
        full = 1 - padding(documents.lengths, lengths)
        return (f"each document is a row of {', '.join(map(str, lengths))} tokens; rows are {full:.2%} full"
                f"{_too_long(documents.cut, corpus.train.num_documents, 'documents', 'cut')}")
    full, cut, documents = [], 0, 0
    for part in filter(_trains, corpus.parts.values() or [corpus]):
        made = _packed(config, part, "train", config.seq_len)
        full.append((made.fill, len(made)))
        cut += made.cut
        documents += part.train.num_documents
    apart = [name for name, part in corpus.parts.items() if not _trains(part)]
    only = f"; {', '.join(apart)}: evaluation only" if apart else ""
    if config.packing == "concat":
        return f"documents are joined end to end and cut into rows of {config.seq_len} tokens{only}"
    fill = sum(share * count for share, count in full) / sum(count for _, count in full)
    what, number, then = "documents", documents, "cut"
    if config.packing in ("pairs", "answers"):
        what, number, then = config.packing, documents // 2 if config.packing == "pairs" else documents, "left out"
    return (f"whole {what} share rows of {config.seq_len} tokens, which are {fill:.2%} full"
            f"{_too_long(cut, number, what, then)}{only}")


def _too_long(count: int, of: int, what: str, then: str) -> str:
    return f"; {count:,} of {of:,} {what} are longer and {then}" if count else ""


def epochs(batches: BatchSource, steps: int) -> str:
    """Return for the log how much of each source the given steps read."""
    return ", ".join((f"{count:.3g} epochs" if count > 1 else f"{count:.2g} of an epoch")
                     + (f" of {name}" if name else "") for name, count in batches.epochs(steps).items())
