"""Corpora of sequences of anything, such as audio frames or user events, stored as named columns.

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
from numpy.typing import ArrayLike

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.corpus import shard_writer
from jaxtrain.data.corpus.corpus import SPLITS
from jaxtrain.data.corpus.open import check, is_dtype, mapped, offsets, read_manifest
from jaxtrain.data.corpus.shard_writer import ORIGIN, Origin
from jaxtrain.data.formats import inputs
from jaxtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import misfit

Columns = dict[str, Any]  # the values of one sequence by column: arrays, and text as it was read
FORMAT = "jaxtrain-sequences-1"
_FORM = {"columns": {str: {"dtype": str, "shape": [int], "per": str}},
         "splits": {name: {"shards": [{"sequences": int}]} for name in SPLITS}}
STEPS = "steps"  # the name of the offsets shared by all columns with a value per step


@dataclass(frozen=True)
class Column:
    """The dtype, shape and granularity of a column's values."""

    dtype: str
    shape: tuple[int, ...] = ()  # of one value
    per: Literal["step", "sequence", "own"] = "step"

    def array(self, values: ArrayLike) -> np.ndarray:
        """Convert values to the array that is stored."""
        return np.ascontiguousarray(values, np.dtype(self.dtype).newbyteorder("<")).reshape(-1, *self.shape)

    def offsets(self, name: str) -> str | None:
        """Return the name of the offsets that delimit each sequence's values; None: one value per sequence."""
        return {"step": STEPS, "sequence": None, "own": name}[self.per]


class SequenceWriter:
    """Writes one shard of sequences to disk as they are added."""

    def __init__(self, path: Path, columns: Mapping[str, Column]):
        self.path, self.columns = path, columns
        names = (column.offsets(name) for name, column in columns.items())
        self.ends: dict[str, list[int]] = {name: [0] for name in names if name}
        self.keys: list[bytes] = []
        self.origins: list[tuple[int, int]] = []
        self._files = {name: shard_writer.Column(_path(path, name)) for name in columns}

    def add(self, values: Mapping[str, np.ndarray], key: bytes, origin: Origin) -> None:
        """Append one sequence, with column values as `Column.array` returns them."""
        counts: dict[str | None, int] = {None: 1}
        for name, column in self.columns.items():
            assert counts.setdefault(column.offsets(name), len(values[name])) == len(values[name])
            self._files[name].write(values[name].tobytes())
        for own, ends in self.ends.items():
            ends.append(ends[-1] + counts[own])
        self.keys.append(key)
        self.origins.append((origin.piece, origin.place))

    def close(self) -> JsonObject:
        """Finish the shard and return its manifest entry."""
        arrays = {f"{name}.offsets": np.array(ends, "<i8") for name, ends in self.ends.items()}
        arrays["keys"] = np.frombuffer(b"".join(self.keys), np.uint8).reshape(-1, 16)
        arrays["origins"] = np.array(self.origins, ORIGIN)
        return {"name": self.path.name, "sequences": len(self.keys), "steps": self.ends[STEPS][-1],
                **shard_writer.close(self.path, list(self._files.values()), arrays)}


def content_key(values: Mapping[str, np.ndarray], columns: Mapping[str, Column]) -> bytes:
    """Return a hash of the steps only: sequences with equal steps belong to one split, whatever their labels."""
    return inputs.content_hash(b"".join(values[name].tobytes() for name in columns if columns[name].per == "step"))


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """One memory-mapped shard of a split of sequences."""

    columns: dict[str, np.ndarray]
    offsets: dict[str, np.ndarray]

    @property
    def lengths(self) -> np.ndarray:
        """The number of steps in each sequence."""
        return np.diff(self.offsets[STEPS])


TOKENIZER = "tokenizer"  # the folder in a corpus with that of its transcripts


@dataclass(frozen=True, eq=False)
class Sequences:
    """One split of a sequence corpus: `sequences[i]` is a dict of arrays, as stored."""

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
        """Return the number of steps in each sequence, or the number of values of a column with its own count."""
        return np.concatenate([np.zeros(0, np.int64), *(np.diff(shard.offsets[name]) for shard in self.shards)])

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(len(shard.lengths) for shard in self.shards)]


@dataclass(frozen=True, eq=False)
class SequenceCorpus:
    """The train and eval splits of a sequence corpus, and their manifest."""

    train: Sequences
    eval: Sequences
    manifest: dict[str, Any]
    path: Path

    @property
    def manifest_hash(self) -> str:
        """The hash that identifies the content, independent of where it was made."""
        return self.manifest["sha256"]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of its transcripts, if it has any."""
        kept = self.path / TOKENIZER
        return load_tokenizer(f"{kept}") if kept.is_dir() else None

    @property
    def manifests(self) -> dict[str, str]:
        """The manifest's hash, under the name of the only source."""
        return {"": self.manifest_hash}


def open_sequences(folder: str | Path, cache: Path | None = None) -> SequenceCorpus:
    """Open a corpus that `prepare_sequences` wrote; with a `cache`, each version of a file is verified only once."""
    folder = Path(folder).expanduser()
    manifest = read_manifest(folder, FORMAT)
    wrong = misfit(manifest, _FORM) or next((
        f"column {name!r} is not one of numbers per step, per sequence or of its own" for name, said
        in manifest["columns"].items() if not is_dtype(said["dtype"], "iuf") or min(said["shape"], default=1) < 1
        or said["per"] not in ("step", "sequence", "own")), "")
    if wrong:
        raise UserError("data.source", f"{folder}/manifest.json cannot be read ({wrong})", "prepare the corpus again")
    columns = {name: Column(said["dtype"], tuple(said["shape"]), said["per"])
               for name, said in manifest["columns"].items()}
    splits = {}
    for split in SPLITS:
        entries = manifest["splits"][split]["shards"]
        for entry in entries:
            for name, sha256 in entry["sha256"].items():
                check(folder / name, sha256, cache)
        splits[split] = Sequences(columns, tuple(_map(folder / entry["name"], columns, entry["sequences"])
                                                 for entry in entries))
    return SequenceCorpus(**splits, manifest=manifest, path=folder)


def describe(columns: Mapping[str, Column]) -> JsonObject:
    """Return the description of the columns that goes into the manifest."""
    return {name: asdict(column) | {"shape": list(column.shape)} for name, column in columns.items()}


def _map(path: Path, columns: Mapping[str, Column], sequences: int) -> SequenceShard:
    arrays = {name: said.array(mapped(_path(path, name), np.dtype(said.dtype))) for name, said in columns.items()}
    names = {own for name, said in columns.items() if (own := said.offsets(name))}
    return SequenceShard(arrays, {name: offsets(path.with_name(f"{path.name}.{name}.offsets.npy"), sequences)
                                  for name in names})


def _path(shard: Path, column: str) -> Path:
    return shard.with_name(f"{shard.name}.{column}.bin")
