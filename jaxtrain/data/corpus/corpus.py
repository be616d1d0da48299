"""Tokens on disk, memory-mapped: documents end to end over any number of shards, each closed by the end-of-document id.

Made by `prepare` and opened by opening.py, or from small text by cache.py.
"""

import bisect
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.errors import UserError

FORMAT = "jaxtrain-corpus-2"
SPLITS = ("train", "eval")
UNFINISHED = "unfinished"  # a folder beside the shards, with what `prepare` knows of them, until there is a manifest


@dataclass(frozen=True, eq=False)
class Shard:
    """One stretch of a split: whole documents."""

    tokens: Any  # an array, or what can be sliced like one
    offsets: np.ndarray  # where each document starts, and the end of the last; int64
    trained: Any = None  # whether each token is to be learnt (1) or only read (0); None: all are


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one split."""

    shards: tuple[Shard, ...]
    num_bytes: int  # of the text that the tokens stand for

    def __post_init__(self):
        starts = [0, *accumulate(len(shard.tokens) for shard in self.shards)]
        object.__setattr__(self, "_starts", starts)

    @property
    def num_tokens(self) -> int:
        """Tokens in the split, end-of-document ids included."""
        return self._starts[-1]  # type: ignore[attr-defined]

    @property
    def num_documents(self) -> int:
        """Documents in the split."""
        return sum(len(shard.offsets) - 1 for shard in self.shards)

    @functools.cached_property
    def masked(self) -> bool:
        """Whether some tokens are only read."""
        return any(shard.trained is not None for shard in self.shards)

    @property
    def lost(self) -> int:
        """Tokens that are known to be corrupt, or their marks; remote ones become known when they are asked for."""
        return sum(max(column.damage.lost if hasattr(column, "damage") else 0
                       for column in (shard.tokens, shard.trained)) for shard in self.shards)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` of the split, as int32."""
        return self.stored(start, stop).astype(np.int32)

    def stored(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` of the split as they are stored, where possible without a copy."""
        parts = [shard.tokens[a:b] for shard, a, b, _ in self._between(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def trained(self, start: int, stop: int) -> np.ndarray | None:
        """Whether tokens `start` to `stop` are to be learnt, or only read; None: all are."""
        if not self.masked:
            return None
        return np.concatenate([np.ones(b - a, bool) if shard.trained is None else shard.trained[a:b] > 0
                               for shard, a, b, _ in self._between(start, stop)])

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Where documents begin within tokens `start` to `stop`, counted in the split."""
        found = []
        for shard, a, b, before in self._between(start, stop):
            first, last = shard.offsets[:-1].searchsorted((a, b))
            found.append(shard.offsets[first:last] + before)
        return np.concatenate(found) if len(found) != 1 else found[0]

    def document(self, place: int) -> tuple[int, int]:
        """-> the shard of the document that this token is in, and the document's number there."""
        starts: list[int] = self._starts  # type: ignore[attr-defined]
        i = bisect.bisect_right(starts, place) - 1
        return i, int(np.searchsorted(self.shards[i].offsets, place - starts[i], "right")) - 1

    def _between(self, start: int, stop: int):
        """(shard, from, to, its own start) of each shard that has a part of it."""
        starts: list[int] = self._starts  # type: ignore[attr-defined]
        i = bisect.bisect_right(starts, start) - 1
        while True:
            before, end = starts[i], starts[i + 1]
            yield self.shards[i], max(start - before, 0), min(stop, end) - before, before
            i += 1
            if stop <= end or i == len(self.shards):
                return


@dataclass(frozen=True, eq=False)
class Corpus:
    """Both splits of a source, and what identifies them."""

    train: Tokens
    eval: Tokens
    tokenizer: Tokenizer
    manifest_hash: str  # the same wherever and by whomever the corpus was made
    path: Path  # of the manifest and of all that is small
    threads: int = 0  # that should read at once, where reading is waiting
    parts: Mapping[str, "Corpus"] = field(default_factory=dict)  # the sources of a mixture, by name

    def part(self, name: str) -> "Corpus":
        """One source of the mixture; a corpus that is none is its own only part."""
        return self.parts[name] if self.parts else self

    @property
    def manifests(self) -> dict[str, str]:
        """The hash of each source."""
        return {name: part.manifest_hash for name, part in self.parts.items()} or {"": self.manifest_hash}


def is_corpus(folder: str | Path) -> bool:
    """Whether `python -m jaxtrain.data.prepare` made this folder, or began to; all that is behind a URL is one.

    A folder of shards is one that was not copied whole: not text either.
    """
    if "://" in str(folder):
        return True
    folder = Path(folder).expanduser()
    if (folder / "manifest.json").is_file():
        return True
    return (folder / UNFINISHED).is_dir() or any(folder.glob("*.offsets.npy"))


def mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """A file of numbers, mapped."""
    try:
        if not path.stat().st_size:  # what is empty cannot be mapped
            return np.zeros(0, dtype)
        # A plain array over the map: slices of np.memmap itself cost microseconds more each.
        return np.asarray(np.memmap(path, dtype, mode="r"))
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> UserError:
    """Of a file of a corpus."""
    return UserError("data.source", f"{path} cannot be read ({error.strerror})", "make it readable, or prepare the "
                     "corpus again")
