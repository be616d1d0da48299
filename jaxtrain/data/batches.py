"""The batches that a config asks for: what a run trains and is evaluated on, and what `inspect` shows."""

from jaxtrain.config import DataConfig
from jaxtrain.data.cache import cache_root
from jaxtrain.data.corpus import Corpus
from jaxtrain.data.damage import SparedRows
from jaxtrain.data.fitting import cached_plan
from jaxtrain.data.loader import Batches
from jaxtrain.data.packing import FittedRows, PackedRows


def train_batches(config: DataConfig, corpus: Corpus) -> Batches:
    """By step: shuffled, reshuffled each epoch, without end."""
    return Batches(rows(config, corpus, "train"), global_batch_size=config.global_batch_size, seed=config.seed,
                   threads=corpus.threads)


def eval_batches(config: DataConfig, corpus: Corpus) -> Batches:
    """Every token of the evaluation split once, shuffled so that the first batches are a fair part."""
    return Batches(rows(config, corpus, "eval"), global_batch_size=config.global_batch_size, seed=0, repeat=False,
                   threads=corpus.threads)


def rows(config: DataConfig, corpus: Corpus, split: str) -> PackedRows | FittedRows | SparedRows:
    """The split in rows of `data.seq_len`, as `data.packing` says; those that are corrupt as `data.corrupt` says."""
    packed = _packed(config, corpus, split)
    return packed if config.corrupt == "fail" else SparedRows(packed, config.seq_len, corpus.tokenizer.eod)


def _packed(config: DataConfig, corpus: Corpus, split: str) -> PackedRows | FittedRows:
    tokens = getattr(corpus, split)
    if config.packing == "concat":
        return PackedRows(tokens, config.seq_len, pad_last=split == "eval")
    plan = cached_plan(tokens, config.seq_len, cache_root(config) / "plans", f"{corpus.manifest_hash} {split}")
    return FittedRows(tokens, plan, config.seq_len)
