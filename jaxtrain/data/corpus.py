"""Tokens on disk, memory-mapped: documents end to end over any number of shards, each closed by the end-of-document id.

A corpus is a folder with a manifest.json, which names its shards with their hashes; nothing else in it counts.
"""

import bisect
import json
import os
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data import files
from jaxtrain.data.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.errors import UserError

FORMAT = "jaxtrain-corpus-2"
SPLITS = ("train", "eval")
UNFINISHED = "unfinished"  # a folder beside the shards, with what `prepare` knows of them, until there is a manifest


@dataclass(frozen=True, eq=False)
class Shard:
    """One stretch of a split: whole documents."""

    tokens: np.ndarray
    offsets: np.ndarray  # where each document starts, and the end of the last; int64
    trained: np.ndarray | None = None  # whether each token is to be learnt (1) or only read (0); None: all are


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

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` of the split, as int32."""
        parts = [shard.tokens[a:b] for shard, a, b, _ in self._between(start, stop)]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(np.int32)

    def trained(self, start: int, stop: int) -> np.ndarray | None:
        """Whether tokens `start` to `stop` are to be learnt, or only read; None: all are."""
        if all(shard.trained is None for shard in self.shards):
            return None
        return np.concatenate([np.ones(b - a, bool) if shard.trained is None else shard.trained[a:b] > 0
                               for shard, a, b, _ in self._between(start, stop)])

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Where documents begin within tokens `start` to `stop`, counted in the split."""
        found = []
        for shard, a, b, before in self._between(start, stop):
            first, last = np.searchsorted(shard.offsets[:-1], (a, b))
            found.append(shard.offsets[first:last] + before)
        return np.concatenate(found) if len(found) != 1 else found[0]

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
    path: Path


def is_corpus(folder: str | Path) -> bool:
    """Whether `python -m jaxtrain.data.prepare` made this folder, or began to."""
    folder = Path(folder).expanduser()
    if (folder / "manifest.json").is_file():
        return True
    return (folder / UNFINISHED).is_dir()


def open_corpus(folder: str | Path, cache: Path | None = None) -> Corpus:
    """Open what `prepare` wrote; each file is checked against its hash once for each version of it."""
    folder = Path(folder).expanduser()
    manifest = read_manifest(folder)
    tokenizer = _tokenizer(folder, manifest)
    dtype = np.dtype(manifest["dtype"])
    splits = {}
    for split in SPLITS:
        entry = manifest["splits"][split]
        for shard in entry["shards"]:
            for name, sha256 in shard["sha256"].items():
                check(folder / name, sha256, cache)
        splits[split] = Tokens(tuple(_map(folder, shard, dtype) for shard in entry["shards"]), entry["bytes"])
    return Corpus(**splits, tokenizer=tokenizer, manifest_hash=manifest["sha256"], path=folder)


def read_manifest(folder: Path, format: str = FORMAT) -> dict[str, Any]:
    """The manifest, checked against its own hash."""
    path = folder / "manifest.json"
    if not path.exists() and (folder / UNFINISHED).is_dir():
        raise UserError("data.source", f"{folder} is not finished", "run the same prepare command again")
    try:
        manifest = json.loads(path.read_bytes())
        recorded = manifest["sha256"]
        content = {key: value for key, value in manifest.items() if key != "sha256"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError("data.source", f"{path} cannot be read ({error})", "prepare the corpus again") from error
    if manifest.get("format") != format:
        raise UserError("data.source", f"{path} is of format {manifest.get('format')!r}, not {format!r}",
                        "prepare the corpus again with this version")
    if files.digest(content) != recorded:
        raise UserError("data.source", f"{path} was changed after it was written", "prepare the corpus again")
    return manifest


def _tokenizer(folder: Path, manifest: dict[str, Any]) -> Tokenizer:
    """The corpus's own, after it has shown that it still gives the ids that it gave."""
    said = manifest["tokenizer"]
    tokenizer = load_tokenizer("bytes" if said["name"] == "bytes" else str(folder / "tokenizer.json"), said["eod"])
    if tokenizer.fingerprint != said["fingerprint"]:
        raise UserError("data.source", f"{folder} has another tokenizer than it was prepared with",
                        "restore its tokenizer.json or prepare the corpus again")
    for probe in manifest["probes"]:
        if tokenizer.encode(probe["text"].encode()).tolist() != probe["ids"]:
            raise UserError("data.source", f"the tokenizer of {folder} gives other ids than when it was prepared: "
                            f"{probe['text'][:40]!r}", "install the version of tokenizers that its manifest names")
    return tokenizer


def check(path: Path, sha256: str, cache: Path | None = None) -> None:
    """Refuse a file that is not what its manifest says. With a `cache`, a version once seen right is not read again."""
    try:
        stat = path.stat()
        identity = [str(path.absolute()), stat.st_size, stat.st_mtime_ns, sha256]
        seen = cache and cache / "checked" / files.digest(identity)
        if seen and seen.exists():
            return
        intact = files.file_digest(path) == sha256
    except OSError as error:
        raise UserError("data.source", f"{path} cannot be read ({error.strerror})",
                        "run the same prepare command again") from error
    if not intact:
        raise UserError("data.source", f"{path} is corrupt: its sha256 is not the manifest's",
                        "delete it and run the same prepare command again")
    if seen:
        try:
            seen.parent.mkdir(parents=True, exist_ok=True)
            seen.touch()
        except OSError:
            pass  # it is checked again next time


def _map(folder: Path, shard: dict[str, Any], dtype: np.dtype) -> Shard:
    # Plain arrays over the maps: slices of np.memmap itself cost microseconds more each.
    name = shard["name"]
    tokens = mapped(folder / f"{name}.bin", dtype)
    trained = mapped(folder / f"{name}.trained.bin", np.dtype(np.uint8)) if "learnt" in shard else None
    return Shard(tokens, np.asarray(np.load(folder / f"{name}.offsets.npy", mmap_mode="r")), trained)


def mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """A file of numbers, mapped."""
    if not os.path.getsize(path):  # what is empty cannot be mapped
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))
