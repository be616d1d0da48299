"""Write corpus shards: documents end to end, with the start, content hash and origin of each."""

import base64
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.tokenizers.tokenizer import Tokenizer
from jaxtrain.files import atomic_files

CHUNK = 2**20  # bytes of a column per checksum, so that parts can be verified without reading the whole
UNDESIRABLE = 2  # in a column that says what is trained on: of an answer with the label false
ORIGIN = np.dtype([("piece", "<u4"), ("place", "<u8")])  # input piece; line, byte, row or document in it


@dataclass(frozen=True, eq=False)
class Origin:
    """The origin of a document: the input piece and the place within it."""

    piece: int
    place: int


class ShardWriter:
    """Writes one shard of documents to disk as they are added.

    Each column is a file with one entry per token: `.bin` holds ids; the optional `.trained.bin` says whether an id is
    trained on (1; UNDESIRABLE) or only context (0).
    """

    def __init__(self, path: Path, dtype: np.dtype, end: int, trained: bool = False):
        self.path, self.dtype, self._end = path, dtype, np.array([end], dtype)
        self.lengths: list[int] = []
        self.keys: list[bytes] = []
        self.origins: list[tuple[int, int]] = []
        self.bytes = self.learnt = 0
        self._tokens = Column(path.with_name(f"{path.name}.bin"))
        self._trained = Column(path.with_name(f"{path.name}.trained.bin")) if trained else None

    def add(self, ids: np.ndarray, key: bytes, num_bytes: int, origin: Origin,
            trained: np.ndarray | None = None) -> None:
        """Append one document and the end-of-document id; the last entry of `trained` is for that id."""
        self._tokens.write(ids.astype(self.dtype, copy=False))
        self._tokens.write(self._end)
        if self._trained:
            assert trained is not None and len(trained) == len(ids) + 1
            flags = trained.astype(np.uint8)
            self.learnt += int((flags > 0).sum())
            self._trained.write(flags)
        self.lengths.append(len(ids) + 1)
        self.keys.append(key)
        self.origins.append((origin.piece, origin.place))
        self.bytes += num_bytes

    def close(self) -> JsonObject:
        """Finish the shard and return its manifest entry."""
        columns = [column for column in (self._tokens, self._trained) if column]
        arrays = {"offsets": np.cumsum([0, *self.lengths], dtype="<i8"),
                  "keys": np.frombuffer(b"".join(self.keys), np.uint8).reshape(-1, 16),
                  "origins": np.array(self.origins, ORIGIN)}
        entry = {"name": self.path.name, "documents": len(self.lengths), "tokens": sum(self.lengths),
                 "bytes": self.bytes, **close(self.path, columns, arrays)}
        return entry | ({"learnt": self.learnt} if self._trained else {})


def close(path: Path, columns: Sequence["Column"], arrays: dict[str, np.ndarray]) -> JsonObject:
    """Close a shard's columns, write its arrays, and return the checksums of all these files."""
    crc32 = {column.path.name: column.close() for column in columns}
    sha256 = {column.path.name: column.sha256.hexdigest() for column in columns}
    for name, array in arrays.items():
        file_path = path.with_name(f"{path.name}.{name}.npy")
        with atomic_files.written(file_path) as file:
            np.save(file, array)
        sha256[file_path.name] = atomic_files.file_digest(file_path)
    return {"crc32": crc32, "sha256": sha256}


class Column:
    """Writes one file, and computes its hash and the checksums of its chunks on the way."""

    def __init__(self, path: Path):
        self.path, self.sha256 = path, hashlib.sha256()
        self._context = atomic_files.written(path)
        self._file = self._context.__enter__()
        self._chunk, self._size = memoryview(bytearray(CHUNK)), 0  # bytes that are not in the file yet
        self._sums: list[int] = []

    def write(self, content: Any) -> None:
        """Append bytes or an array."""
        left = memoryview(content).cast("B") if len(content) else memoryview(b"")
        while left:
            some, left = left[: CHUNK - self._size], left[CHUNK - self._size:]
            self._chunk[self._size: self._size + len(some)] = some
            self._size += len(some)
            if self._size == CHUNK:
                self._end_chunk()

    def close(self) -> str:
        """Finish the file and return the chunk checksums as base64 text."""
        if self._size:
            self._end_chunk()
        self._context.__exit__(None, None, None)
        return base64.b64encode(np.array(self._sums, "<u4").tobytes()).decode()

    def _end_chunk(self) -> None:
        chunk = self._chunk[: self._size]
        self._file.write(chunk)
        self._sums.append(zlib.crc32(chunk))
        self.sha256.update(chunk)
        self._size = 0


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """Return the narrowest dtype that holds every token id."""
    return np.min_scalar_type(tokenizer.vocab_size - 1).newbyteorder("<")
