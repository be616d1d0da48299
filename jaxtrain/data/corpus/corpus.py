"""A tokenised corpus: memory-mapped shards of documents, each document closed by the end-of-document id.

`prepare` makes a corpus and open.py opens it; text_cache.py makes one from small text.
"""

import bisect
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxtrain.data.tokenizers.tokenizer import Tokenizer

FORMAT = "jaxtrain-corpus-2"
SPLITS = ("train", "eval")
UNFINISHED = "unfinished"  # a folder next to the shards that holds the state of `prepare` until the manifest is written


@dataclass(frozen=True, eq=False)
class Shard:
    """A part of a split that holds whole documents."""

    tokens: Any  # an array, or an object that can be sliced like one
    offsets: np.ndarray  # int64: the start of each document, and the end of the last one
    trained: Any = None  # whether each token is trained on (1; 2: undesirable) or context (0); None: all are trained on


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one split; a Grain data source of its documents: `tokens[i]` is a dict with the ids of document i.
    """

    shards: tuple[Shard, ...]
    num_bytes: int  # size of the text behind the tokens
    whole: ClassVar[bool] = False  # whether nothing between two edges may be cut

    def __post_init__(self):
        starts = [0, *accumulate(len(shard.tokens) for shard in self.shards)]
        object.__setattr__(self, "_starts", starts)

    def __len__(self) -> int:
        return self.num_documents

    def __bool__(self) -> bool:
        return True  # also one without documents

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        number = bisect.bisect_right(self.first_documents, i) - 1
        shard, at = self.shards[number], i - self.first_documents[number]
        start, stop = shard.offsets[at: at + 2]
        return {"tokens": shard.tokens[start:stop].astype(np.int32)}

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the split, including end-of-document ids."""
        return self._starts[-1]  # type: ignore[attr-defined]

    @property
    def num_documents(self) -> int:
        """The number of documents in the split."""
        return sum(len(shard.offsets) - 1 for shard in self.shards)

    @functools.cached_property
    def first_documents(self) -> list[int]:
        """The number of documents before each shard, and behind the last."""
        return [0, *accumulate(len(shard.offsets) - 1 for shard in self.shards)]

    @functools.cached_property
    def masked(self) -> bool:
        """Whether some tokens are only context, without a loss."""
        return any(shard.trained is not None for shard in self.shards)

    @property
    def lost(self) -> int:
        """The number of tokens known to be corrupt, in ids or masks; a remote chunk is known only once it is read."""
        return sum(max(column.damage.lost if hasattr(column, "damage") else 0
                       for column in (shard.tokens, shard.trained)) for shard in self.shards)

    def edges(self, shard: Shard) -> np.ndarray:
        """Return where each document of a shard begins and the last one ends."""
        return shard.offsets

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens `start` to `stop` of the split as int32."""
        return self.stored(start, stop).astype(np.int32)

    def stored(self, start: int, stop: int) -> np.ndarray:
        """Return tokens `start` to `stop` of the split in their stored dtype, without a copy where possible."""
        parts = [shard.tokens[a:b] for shard, a, b, _ in self._between(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def trained(self, start: int, stop: int) -> np.ndarray | None:
        """Return whether each of tokens `start` to `stop` is trained on; None: all are."""
        if not self.masked:
            return None
        return np.concatenate([np.ones(b - a, bool) if shard.trained is None else shard.trained[a:b] > 0
                               for shard, a, b, _ in self._between(start, stop)])

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Return the places within `start` to `stop` where documents begin, counted from the start of the split."""
        found = []
        for shard, a, b, before in self._between(start, stop):
            first, last = shard.offsets[:-1].searchsorted((a, b))
            found.append(shard.offsets[first:last] + before)
        return np.concatenate(found) if len(found) != 1 else found[0]

    def document(self, place: int) -> tuple[int, int]:
        """Return the index of the shard that holds the token at `place`, and its document's index in that shard."""
        starts: list[int] = self._starts  # type: ignore[attr-defined]
        i = bisect.bisect_right(starts, place) - 1
        return i, int(np.searchsorted(self.shards[i].offsets, place - starts[i], "right")) - 1

    def shard_start(self, shard: int) -> int:
        """Return the place in the split of the first token of a shard."""
        return self._starts[shard]  # type: ignore[attr-defined]

    def _between(self, start: int, stop: int):
        """Yield (shard, from, to, start of the shard in the split) for each shard that overlaps `start` to `stop`."""
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
    """The train and eval splits of a data source, their tokenizer, and the hash that identifies them."""

    train: Tokens
    eval: Tokens
    tokenizer: Tokenizer
    manifest_hash: str  # depends on the content only, not on where or when it was made
    path: Path  # the folder of the manifest and the other small files
    threads: int = 0  # number of reader threads, where reading waits for a network
    parts: Mapping[str, "Corpus"] = field(default_factory=dict)  # the sources of a mixture, by name
    chat: dict[str, Any] | None = None  # the chat template of its conversations
    pairs: bool = False  # documents 2i and 2i + 1 are the chosen and the rejected answer to a prompt
    labelled: bool = False  # each document is an answer that is desirable or not

    def part(self, name: str) -> "Corpus":
        """Return one source of the mixture; a corpus that is not a mixture is its own only part."""
        return self.parts[name] if self.parts else self

    @property
    def manifests(self) -> dict[str, str]:
        """The manifest hash of each source, by name."""
        return {name: part.manifest_hash for name, part in self.parts.items()} or {"": self.manifest_hash}


def is_corpus(folder: str | Path) -> bool:
    """Return whether a folder is a corpus of `jaxtrain prepare`, even an unfinished one; every URL is.

    A folder of shards without a manifest also counts: it is an incomplete copy of a corpus rather than text.
    """
    if "://" in str(folder):
        return True
    folder = Path(folder).expanduser()
    if (folder / "manifest.json").is_file():
        return True
    return (folder / UNFINISHED).is_dir() or any(folder.glob("*.offsets.npy"))
