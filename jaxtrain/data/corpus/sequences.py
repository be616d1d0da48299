"""Sequences of anything: frames of audio, events of a user. What a corpus of tokens is to text, with columns by name.

A column has a value for each step (a frame's features, an event's item), one for the whole sequence (a label), or a
number of values of its own (a transcript). On disk each is a flat file; a shard's manifest entry has their checksums.
"""

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxtrain.data.corpus import shard_writer
from jaxtrain.data.corpus.corpus import SPLITS, mapped
from jaxtrain.data.corpus.open import check, read_manifest
from jaxtrain.data.corpus.shard_writer import ORIGIN, Origin
from jaxtrain.data.formats import inputs

FORMAT = "jaxtrain-sequences-1"
STEPS = "steps"  # the name of the offsets that all columns with a value for each step share


@dataclass(frozen=True)
class Column:
    """What the values of a column are."""

    dtype: str
    shape: tuple[int, ...] = ()  # of one value
    per: Literal["step", "sequence", "own"] = "step"

    def array(self, values: Any) -> np.ndarray:
        """Of values, as they are stored."""
        return np.ascontiguousarray(values, np.dtype(self.dtype).newbyteorder("<")).reshape(-1, *self.shape)

    def offsets(self, name: str) -> str | None:
        """Which array says where each sequence's values begin; None: each has one."""
        return {"step": STEPS, "sequence": None, "own": name}[self.per]


class SequenceWriter:
    """One shard under way: sequences go to disk as they come."""

    def __init__(self, path: Path, columns: Mapping[str, Column]):
        self.path, self.columns = path, columns
        names = (column.offsets(name) for name, column in columns.items())
        self.ends: dict[str, list[int]] = {name: [0] for name in names if name}
        self.keys: list[bytes] = []
        self.origins: list[tuple[int, int]] = []
        self._files = {name: shard_writer.Column(_path(path, name)) for name in columns}

    def add(self, values: Mapping[str, np.ndarray], key: bytes, origin: Origin) -> None:
        """One sequence: its columns as `Column.array` gives them."""
        counts: dict[str | None, int] = {None: 1}
        for name, column in self.columns.items():
            assert counts.setdefault(column.offsets(name), len(values[name])) == len(values[name])
            self._files[name].write(values[name].tobytes())
        for offsets, ends in self.ends.items():
            ends.append(ends[-1] + counts[offsets])
        self.keys.append(key)
        self.origins.append((origin.piece, origin.place))

    def close(self) -> dict[str, Any]:
        """-> the shard's entry in the manifest."""
        arrays = {f"{name}.offsets": np.array(ends, "<i8") for name, ends in self.ends.items()}
        arrays["keys"] = np.frombuffer(b"".join(self.keys), np.uint8).reshape(-1, 16)
        arrays["origins"] = np.array(self.origins, ORIGIN)
        return {"name": self.path.name, "sequences": len(self.keys), "steps": self.ends[STEPS][-1],
                **shard_writer.close(self.path, list(self._files.values()), arrays)}


def content_key(values: Mapping[str, np.ndarray], columns: Mapping[str, Column]) -> bytes:
    """Equal for sequences with equal steps, whatever is said about them: those belong to one split."""
    return inputs.content_hash(b"".join(values[name].tobytes() for name in columns if columns[name].per == "step"))


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """One stretch of a split, memory-mapped."""

    columns: dict[str, np.ndarray]
    offsets: dict[str, np.ndarray]

    @property
    def lengths(self) -> np.ndarray:
        """Steps of each sequence."""
        return np.diff(self.offsets[STEPS])


@dataclass(frozen=True, eq=False)
class Sequences:
    """One split: `sequences[i]` is a dict of arrays, as stored."""

    columns: dict[str, Column]
    shards: tuple[SequenceShard, ...]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"sequence {i} of {len(self)}")
        number = bisect.bisect_right(self._starts, i) - 1
        shard, at = self.shards[number], i - self._starts[number]
        found = {}
        for name, said in self.columns.items():
            offsets = said.offsets(name)
            start, stop = (at, at + 1) if offsets is None else shard.offsets[offsets][at: at + 2]
            found[name] = shard.columns[name][start:stop]
        return found

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return map(self.__getitem__, range(len(self)))

    def counts(self, name: str = STEPS) -> np.ndarray:
        """Steps of each sequence, or values of a column with a number of its own."""
        return np.concatenate([np.zeros(0, np.int64), *(np.diff(shard.offsets[name]) for shard in self.shards)])

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(len(shard.lengths) for shard in self.shards)]


@dataclass(frozen=True, eq=False)
class SequenceCorpus:
    """Both splits, and what identifies them."""

    train: Sequences
    eval: Sequences
    manifest: dict[str, Any]
    path: Path

    @property
    def manifest_hash(self) -> str:
        """The same wherever and by whomever the corpus was made."""
        return self.manifest["sha256"]


def open_sequences(folder: str | Path, cache: Path | None = None) -> SequenceCorpus:
    """Open what `prepare_sequences` wrote; with a `cache` a file is checked once for each version of it."""
    folder = Path(folder).expanduser()
    manifest = read_manifest(folder, FORMAT)
    columns = {name: Column(said["dtype"], tuple(said["shape"]), said["per"])
               for name, said in manifest["columns"].items()}
    splits = {}
    for split in SPLITS:
        entries = manifest["splits"][split]["shards"]
        for entry in entries:
            for name, sha256 in entry["sha256"].items():
                check(folder / name, sha256, cache)
        splits[split] = Sequences(columns, tuple(_map(folder / entry["name"], columns) for entry in entries))
    return SequenceCorpus(**splits, manifest=manifest, path=folder)


def describe(columns: Mapping[str, Column]) -> dict[str, Any]:
    """For the manifest."""
    return {name: asdict(column) | {"shape": list(column.shape)} for name, column in columns.items()}


def _map(path: Path, columns: Mapping[str, Column]) -> SequenceShard:
    arrays = {name: said.array(mapped(_path(path, name), np.dtype(said.dtype))) for name, said in columns.items()}
    names = {offsets for name, said in columns.items() if (offsets := said.offsets(name))}
    return SequenceShard(arrays, {name: np.asarray(np.load(f"{path}.{name}.offsets.npy", mmap_mode="r"))
                                  for name in names})


def _path(shard: Path, column: str) -> Path:
    return shard.with_name(f"{shard.name}.{column}.bin")
