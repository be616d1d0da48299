"""The batches that a config asks for: what a run trains and is evaluated on, and what `inspect` shows."""

from jaxtrain.config import DataConfig
from jaxtrain.data.corpus import Corpus
from jaxtrain.data.loader import Batches
from jaxtrain.data.packing import PackedRows


def train_batches(config: DataConfig, corpus: Corpus) -> Batches:
    """By step: shuffled, reshuffled each epoch, without end."""
    return Batches(PackedRows(corpus.train, config.seq_len), global_batch_size=config.global_batch_size,
                   seed=config.seed)


def eval_batches(config: DataConfig, corpus: Corpus) -> Batches:
    """Every token of the evaluation split once, shuffled so that the first batches are a fair part."""
    return Batches(PackedRows(corpus.eval, config.seq_len, pad_last=True),
                   global_batch_size=config.global_batch_size, seed=0, repeat=False)
