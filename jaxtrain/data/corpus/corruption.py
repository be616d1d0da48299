"""Stretches of a corpus that are corrupt: what touches them is left out, and everything else stays where it was.

With `data.corrupt=skip_and_count` a row that would need such a stretch keeps its place in the order of rows, but
carries no loss. Which stretch is corrupt follows from the checksums of chunks that the manifest has.
"""

import base64
import threading
import warnings
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.corpus.shard_writer import CHUNK
from jaxtrain.data.loading.loader import take


class Lost(Exception):
    """A row cannot be read, for a part of it is corrupt."""


class Damage:
    """The chunks of a column that are known to be corrupt."""

    def __init__(self, name: str, dtype: np.dtype, length: int, crc32: str):
        self.name, self.dtype, self.length = name, dtype, length
        self.sums = np.frombuffer(base64.b64decode(crc32), "<u4")
        self.bad: set[int] = set()
        self._lock = threading.Lock()

    def chunks(self, start: int, stop: int) -> range:
        """The numbers of those that hold elements `start` to `stop`."""
        return range(start * self.dtype.itemsize // CHUNK, -(-stop * self.dtype.itemsize // CHUNK))

    def edges(self, number: int) -> tuple[int, int]:
        """Where a chunk begins and ends, in bytes of the column."""
        return number * CHUNK, min((number + 1) * CHUNK, self.length * self.dtype.itemsize)

    def intact(self, number: int, content: Any) -> bool:
        """Whether it is what was written."""
        return zlib.crc32(content) == self.sums[number]

    def add(self, numbers: Iterable[int]) -> None:
        """Some more; the first are told."""
        with self._lock:
            first = not self.bad
            self.bad = self.bad | set(numbers)  # another set: somebody may be counting this one
        if first and self.bad:
            warnings.warn(f"data.corrupt: {self.name} is corrupt, {self.lost:,} of its {self.length:,} tokens as far "
                          "as is known; rows that need them carry no loss", stacklevel=2)

    @property
    def lost(self) -> int:
        """Elements, as far as is known."""
        return sum(stop - start for start, stop in map(self.edges, self.bad)) // self.dtype.itemsize


class DamagedColumn:
    """A file that is not what it was, or not there: its good chunks can be read."""

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
    """Rows, of which those that are lost are empty: padding that ends of documents fill."""

    def __init__(self, rows: Any, seq_len: int, end: int):
        self._rows, self._lock = rows, threading.Lock()
        self.lost: set[int] = set()  # the rows that were asked for and could not be read
        ends, none = np.full(seq_len, end, np.int32), np.zeros(seq_len, np.int32)
        self._empty = {"tokens": ends, "targets": ends, "segments": none, "positions": none,
                       "weights": none.astype(np.float32)}

    def __len__(self) -> int:
        return len(self._rows) if hasattr(self._rows, "__len__") else len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        try:
            return self._rows[i]
        except Lost:
            self._count(i)
            return self._empty

    def _count(self, i: int) -> None:
        with self._lock:
            fresh = i not in self.lost
            self.lost.add(int(i))
            count = len(self.lost)
        if fresh and count & (count - 1) == 0:  # 1, 2, 4, 8, ...
            warnings.warn(f"data.corrupt: {count} of {len(self)} rows carry no loss, so far", stacklevel=3)

    @property
    def lengths(self) -> np.ndarray:
        """Of rows of their own."""
        return self._rows.lengths

    @property
    def cut(self) -> int:
        """Documents of which not all is in one row."""
        return self._rows.cut

    def row(self, i: int, length: int) -> dict[str, np.ndarray]:
        """A row of its own, padded to `length`."""
        try:
            return self._rows.row(i, length)
        except Lost:
            self._count(i)
            return {name: column[:length] for name, column in self._empty.items()}

    def take(self, numbers: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Several rows, each array with one dimension more; one by one only where some are lost."""
        try:
            return take(self._rows, np.asarray(numbers))
        except Lost:
            rows = [self[int(number)] for number in numbers]
            return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def places(self, i: int) -> list[int]:
        """Where each segment of a row begins, in the tokens of the split."""
        return self._rows.places(i)
