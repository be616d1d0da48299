"""The batches that a config describes of a prepared corpus of sequences: one in a row, in buckets by length."""

from collections.abc import Mapping

import numpy as np

from jaxtrain import storage
from jaxtrain.config.schema import DataConfig
from jaxtrain.data.corpus.sequences import SequenceCorpus, Sequences, open_sequences
from jaxtrain.data.corpus.text_cache import cache_root
from jaxtrain.data.loading.batch_spec import SEQ, Array
from jaxtrain.data.loading.bucketing import BucketedBatches, bucket_lengths, padding
from jaxtrain.data.packing.document_rows import SequenceRows, Unpacked
from jaxtrain.errors import UserError


def load_sequences(config: DataConfig) -> SequenceCorpus:
    """Open the corpus of sequences that `data.source` names."""
    if config.source == DataConfig.source or storage.is_url(config.source):
        raise UserError("data.source", f"{config.source} is not a folder with a prepared corpus of sequences",
                        "name one that jaxtrain prepare_sequences wrote")
    return open_sequences(config.source, cache_root(config))


class DeclaredRows(Unpacked):
    """Rows of a sequence corpus with just the arrays that a model declares, in their dtypes and shapes."""

    def __init__(self, config: DataConfig, sequences: Sequences, arrays: Mapping[str, Array]):
        """Refuse columns that are missing or of another shape, and sequences that are too long."""
        for name, array in arrays.items():  # first: of a corpus of another kind the lengths do not matter
            _check(sequences, name, array)
        self._rows, self._arrays = SequenceRows(sequences, config.seq_len, crop=True), arrays
        self.lengths, self.cut = self._rows.lengths, int((sequences.counts() > config.seq_len).sum())
        # What is said of a sequence as a whole, such as a transcript, would say more than is left of it.
        whole = any(name in arrays and column.per == "own" for name, column in sequences.columns.items())
        if self.cut and (whole or not config.crop):
            raise UserError("data.seq_len", f"{self.cut:,} sequences have more than {config.seq_len} steps, the "
                            f"longest {sequences.counts().max():,}", "raise it, or prepare shorter ones" if whole else
                            "raise it, or truncate them with data.crop=true")

    def row(self, i: int, length: int) -> dict[str, np.ndarray]:
        """Return the arrays of one sequence, padded to `length`."""
        row = self._rows.row(i, length)
        return {name: _padded(row[name], array.shape(1, length)[1:]).astype(array.dtype)
                for name, array in self._arrays.items()}


def sequence_batches(config: DataConfig, corpus: SequenceCorpus, split: str,
                     arrays: Mapping[str, Array]) -> BucketedBatches | None:
    """Return the batches of a split by step; None if it has no sequences.

    Those of "train" are endless and in buckets, as `data.buckets` or the lengths say. Those of "eval" have every
    sequence once, in rows of `data.seq_len`: one shape, and the first ones are a fair sample.
    """
    if not len(sequences := getattr(corpus, split)):
        if split == "train":
            raise UserError("data.source", "it has no sequence to train on", "prepare it with a smaller eval_fraction")
        return None
    counts = {name: len(known["values"]) + 1 for name, known in corpus.manifest.get("vocabularies", {}).items()}
    for name, count in {"label": len(corpus.manifest.get("labels", ())), **counts}.items():
        if name in arrays and 0 < arrays[name].below < count:
            raise UserError("data.source", f"its column {name!r} has ids up to {count - 1}, and the model takes those "
                            f"below {arrays[name].below}", f"give the model {count} or more")
    rows, train = DeclaredRows(config, sequences, arrays), split == "train"
    buckets = bucket_lengths(config, rows.lengths, "steps") if train else (config.seq_len,)
    return BucketedBatches(rows, buckets=buckets, global_batch_size=config.global_batch_size,
                           seed=config.seed if train else 0, repeat=train)


def summary(config: DataConfig, corpus: SequenceCorpus) -> tuple[str, str]:
    """Return for the log how much there is in each split, and how sequences become rows."""
    lengths = np.minimum(corpus.train.counts(), config.seq_len)
    buckets = bucket_lengths(config, lengths, "steps")
    cut = int((corpus.train.counts() > config.seq_len).sum())
    return (f"{len(corpus.train):,} training and {len(corpus.eval):,} evaluation sequences",
            f"each sequence is a row of {', '.join(map(str, buckets))} steps; rows are "
            f"{1 - padding(lengths, buckets):.2%} full"
            + (f"; {cut:,} of {len(lengths):,} sequences are longer and cut" if cut else ""))


def _check(sequences: Sequences, name: str, array: Array) -> None:
    """Refuse a corpus that has not what an array is made of."""
    column = sequences.columns.get(name)
    if column is None and (name == "weights" or name.removesuffix("_weights") in sequences.columns):
        return  # SequenceRows makes it
    if column is None:
        raise UserError("data.source", f"it has no column {name!r}, which the model reads; it has "
                        f"{', '.join(sequences.columns)}", "name another corpus, or the columns in the model's keys")
    dims = {"step": (SEQ,), "sequence": (), "own": array.dims[:1]}[column.per] + column.shape
    if dims != array.dims:
        raise UserError("data.source", f"its column {name!r} has rows of {_said(dims)}, and the model takes "
                        f"{_said(array.dims)}", "name another corpus")
    if column.per == "own" and (most := int(sequences.counts(name).max(initial=0))) > int(array.dims[0]):
        raise UserError("data.source", f"its column {name!r} has up to {most} values, and the model takes "
                        f"{array.dims[0]}", "raise that in the model's keys (whisper: model.max_seq_len), or leave out "
                        "what is longer")


def _said(dims: tuple[str | int, ...]) -> str:
    return " x ".join("steps" if size == SEQ else str(size) for size in dims) or "one value"


def _padded(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array with zeros behind its first dimension's values, up to the shape, or without zeros beyond it."""
    if x.shape == shape:
        return x
    return np.pad(x[:shape[0]], [(0, max(0, shape[0] - len(x))), *[(0, 0)] * (x.ndim - 1)])
