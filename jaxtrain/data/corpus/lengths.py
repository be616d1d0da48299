"""A histogram of the document lengths of a corpus, by powers of two, as text and as a drawing."""

import importlib
from pathlib import Path

import numpy as np

from jaxtrain.data.corpus.corpus import Corpus
from jaxtrain.errors import UserError, install_extra
from jaxtrain.files import atomic_files


def counts(corpus: Corpus) -> list[int]:
    """Return, for each i, how many documents have at least 2^i and fewer than 2^(i+1) tokens."""
    found = np.zeros(64, np.int64)
    for split in (corpus.train, corpus.eval):
        for shard in split.shards:
            lengths = np.diff(shard.offsets)  # at least 1: the end-of-document id
            found += np.bincount(np.log2(lengths).astype(int), minlength=64)
    return np.trim_zeros(found, "b").tolist()


def histogram(corpus: Corpus) -> str:
    """Return the histogram of document lengths as text for the terminal."""
    found = counts(corpus)
    if not found:
        return "no documents"
    width = 40 / max(found)
    return "\n".join(["documents by tokens"] + [f"{2**i:>12,}+ {count:>12,} {'#' * round(count * width)}"
                                                for i, count in enumerate(found) if count])


def check_drawing(path: Path) -> None:
    """Raise a UserError if `draw` could not write this drawing, so that a long job fails before it starts."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UserError("--histogram", "matplotlib is not installed", install_extra("plots")) from error
    if path.is_dir() or not path.parent.is_dir():
        raise UserError("--histogram", f"{path} is a folder, or its folder does not exist", "name a file in a folder")


def draw(corpus: Corpus, path: Path) -> None:
    """Write the histogram of document lengths as a PNG."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
    found = counts(corpus)
    axes = figure.add_subplot()
    axes.bar(range(len(found)), found, width=0.9)
    axes.set_xticks(range(len(found)), [f"{2**i:,}+" for i in range(len(found))], rotation=45, ha="right")
    axes.set(xlabel="tokens of a document", ylabel="documents", title=corpus.path.absolute().name)
    try:
        with atomic_files.written(path) as file:
            figure.savefig(file, dpi=150, format="png")
    except OSError as error:
        raise UserError("--histogram", f"{path} cannot be written ({error.strerror})", "name another file") from error
