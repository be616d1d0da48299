"""Training on a corpus with corrupt stretches: rows that touch them are dropped, and all other rows keep their place.

With `data.corrupt=skip_and_count` a row that needs a corrupt stretch keeps its place in the order of rows, but has no
loss. Corruption is found by the checksums of chunks in the manifest.
"""

import base64
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.corpus.shard_writer import CHUNK
from jaxtrain.data.loading.loader import take
from jaxtrain.errors import UserError

MANY = 1000  # rows that are enough to judge a source


class Lost(Exception):
    """Raised when a row cannot be read because a part of it is corrupt."""


class Damage:
    """The record of a column's chunks that are known to be corrupt."""

    def __init__(self, name: str, dtype: np.dtype, length: int, crc32: str):
        self.name, self.dtype, self.length = name, dtype, length
        try:
            self.sums = np.frombuffer(base64.b64decode(crc32), "<u4")
        except ValueError:  # not base64, or not whole numbers
            self.sums = np.zeros(0, "<u4")
        if len(self.sums) != len(self.chunks(0, length)):
            raise UserError("data.source", f"{name} has {len(self.sums)} checksums for {length:,} tokens",
                            "prepare the corpus again")
        self.bad: set[int] = set()
        self._lock = threading.Lock()

    def chunks(self, start: int, stop: int) -> range:
        """Return the numbers of the chunks that hold elements `start` to `stop`."""
        return range(start * self.dtype.itemsize // CHUNK, -(-stop * self.dtype.itemsize // CHUNK))

    def edges(self, number: int) -> tuple[int, int]:
        """Return the start and end of a chunk, in bytes of the column."""
        return number * CHUNK, min((number + 1) * CHUNK, self.length * self.dtype.itemsize)

    def intact(self, number: int, content: Any) -> bool:
        """Return whether the content of a chunk matches its checksum."""
        return zlib.crc32(content) == self.sums[number]

    def add(self, numbers: Iterable[int]) -> None:
        """Add corrupt chunks, and warn when they are the first."""
        with self._lock:
            first = not self.bad
            self.bad = self.bad | set(numbers)  # a new set: another thread may be iterating over the old one
        if first and self.bad:
            warnings.warn(f"data.corrupt: {self.name} is corrupt, {self.lost:,} of its {self.length:,} tokens so far; "
                          "rows that need them carry no loss", stacklevel=2)

    @property
    def lost(self) -> int:
        """The number of elements known to be corrupt."""
        return sum(stop - start for start, stop in map(self.edges, self.bad)) // self.dtype.itemsize


class DamagedColumn:
    """A column file that is damaged or missing, of which the intact chunks can still be read."""

    def __init__(self, path: Path, dtype: np.dtype, length: int, crc32: str):
        self.damage = Damage(str(path), dtype, length, crc32)
        self._bytes = np.memmap(path, np.uint8, mode="r") if path.exists() and path.stat().st_size else b""
        pieces = {number: self._bytes[slice(*self.damage.edges(number))] for number in self.damage.chunks(0, length)}
        self.damage.add(number for number, piece in pieces.items() if not self.damage.intact(number, piece))

    def __len__(self) -> int:
        return self.damage.length

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, _ = where.indices(len(self))
        if not self.damage.bad.isdisjoint(self.damage.chunks(start, stop)):
            raise Lost(self.damage.name)
        size = self.damage.dtype.itemsize
        return np.frombuffer(self._bytes[start * size: stop * size], self.damage.dtype)


class SparedRows:
    """Rows of which the corrupt ones are replaced by padding: end-of-document ids with weight 0.

    A source is refused if all of its rows are corrupt, or all of the first thousand that are read.
    """

    def __init__(self, rows: Any, seq_len: int, end: int):
        self.rows, self._lock, self._intact, self._refused = rows, threading.Lock(), False, 0
        self.lost: set[int] = set()  # the rows that were requested and could not be read
        ends, none = np.full(seq_len, end, np.int32), np.zeros(seq_len, np.int32)
        self._empty = {"tokens": ends, "targets": ends, "segments": none, "positions": none,
                       "weights": none.astype(np.float32)}
        self._empty |= {name: none.astype(dtype) for name, dtype in getattr(rows, "columns", {}).items()}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        try:
            return self._read(lambda: self.rows[i])
        except Lost:
            self._count(i)
            return self._empty

    def _read(self, read: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        rows = read()
        self._intact = True
        return rows

    def _count(self, i: int) -> None:
        with self._lock:
            fresh = i not in self.lost
            self.lost.add(int(i))
            self._refused += 1
            count = len(self.lost)
        if self._refused >= min(MANY, len(self)) and not self._intact:
            raise UserError("data.source", f"all {count:,} rows that were read are corrupt",
                            "prepare the corpus again, or copy it again")
        if fresh and count & (count - 1) == 0:  # 1, 2, 4, 8, ...
            warnings.warn(f"data.corrupt: {count} of {len(self)} rows carry no loss, so far", stacklevel=3)

    @property
    def lengths(self) -> np.ndarray:
        """The length of each row, where rows have different lengths."""
        return self.rows.lengths

    @property
    def cut(self) -> int:
        """The number of documents that do not lie in a single row."""
        return self.rows.cut

    def row(self, i: int, length: int) -> dict[str, np.ndarray]:
        """Return a row padded to `length`."""
        try:
            return self._read(lambda: self.rows.row(i, length))
        except Lost:
            self._count(i)
            return {name: column[:length] for name, column in self._empty.items()}

    def take(self, numbers: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Return several rows stacked; they are read one by one only if some are corrupt."""
        try:
            return self._read(lambda: take(self.rows, np.asarray(numbers)))
        except Lost:
            rows = [self[int(number)] for number in numbers]
            return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def places(self, i: int) -> list[int]:
        """Return where each segment of a row begins, in the tokens of the split."""
        return self.rows.places(i)
