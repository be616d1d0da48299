"""Where documents come from: text, JSON lines, Parquet, tokens in Megatron's format; cut into tasks of bounded size.

What the tasks are follows from names and sizes alone: the same on every machine, for any number of workers.
"""

import functools
import gzip
import hashlib
import io
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxtrain.errors import UserError

JSONL = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")
PACKED = (".gz", ".zst")
FIX = "name files or folders of text, .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .idx with .bin"


@dataclass(frozen=True)
class Piece:
    """A stretch of one file: bytes of text or JSON lines (those that begin in it), row groups, documents of an .idx."""

    name: str  # path relative to its input, with forward slashes
    path: str
    kind: str  # text, jsonl, parquet or megatron
    start: int
    stop: int
    size: int  # of the stretch as it is stored, in bytes

    def identity(self) -> dict[str, Any]:
        """What it is, wherever it lies."""
        return {key: value for key, value in asdict(self).items() if key != "path"}


@dataclass(frozen=True)
class Text:
    """One document."""

    name: str  # the piece, and the place within it
    content: bytes  # UTF-8
    place: int = 0  # the byte or (compressed) line where it begins, its row in the group; 0 for a file of text


@dataclass(frozen=True)
class Ids:
    """One document that is tokens already."""

    name: str
    ids: np.ndarray
    place: int = 0  # its number


def find_tasks(inputs: Sequence[str], task_bytes: int = 2**26) -> list[tuple[Piece, ...]]:
    """All pieces in order of input and name; neighbours share a task while they are small."""
    pieces = [piece for source in inputs for name, path in _files(source) for piece in _pieces(name, path, task_bytes)]
    if not pieces:
        raise UserError("--input", f"{', '.join(inputs)} has no files", FIX)
    return cut([(piece,) for piece in pieces], task_bytes)


def cut(groups: Iterable[tuple[Piece, ...]], task_bytes: int) -> list[tuple[Piece, ...]]:
    """Tasks of whole groups in their order; a group that is larger than a task has one of its own."""
    tasks: list[list[Piece]] = [[]]
    room = task_bytes
    for group in groups:
        size = sum(piece.size for piece in group)
        if tasks[-1] and size > room:
            tasks.append([])
            room = task_bytes
        tasks[-1] += group
        room -= size
    return [tuple(task) for task in tasks]


def _files(source: str) -> list[tuple[str, Path]]:
    root = Path(source).expanduser()
    if not root.exists():
        raise UserError("--input", f"{source} does not exist", FIX)
    if root.is_file():
        return [(root.name, root)]
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted((path.relative_to(root).as_posix(), path) for path in found if path.is_file())


def _pieces(name: str, path: Path, task_bytes: int) -> Iterator[Piece]:
    size = path.stat().st_size
    if name.endswith(".parquet"):
        groups = _parquet().ParquetFile(path).metadata
        for i in range(groups.num_row_groups):
            yield Piece(name, str(path), "parquet", i, i + 1, groups.row_group(i).total_byte_size)
    elif name.endswith(".idx"):
        yield from _documents(name, path, task_bytes)
    elif path.suffix == ".bin" and path.with_suffix(".idx").exists():
        return  # read by way of its index
    elif name.endswith(JSONL):
        # What is compressed cannot be entered in the middle.
        step = max(size, 1) if name.endswith(PACKED) else task_bytes
        for start in range(0, size, step):
            yield Piece(name, str(path), "jsonl", start, min(start + step, size), min(step, size - start))
    elif size:
        yield Piece(name, str(path), "text", 0, size, size)


def read(piece: Piece, field: str) -> Iterator[Text | Ids | str]:
    """Its documents in order; a string instead of one says why it was left out (a record without text is an error)."""
    if piece.kind == "text":
        with open(piece.path, "rb") as file:
            content = file.read()
        if b"\0" in content[:8192] or not _is_utf8(content):
            yield f"{piece.name}: not UTF-8 text"
        else:
            yield Text(piece.name, content)
    elif piece.kind == "jsonl":
        yield from _json_lines(piece, field)
    elif piece.kind == "megatron":
        index = _index(Path(piece.path), Path(piece.path).stat().st_mtime_ns)
        for document in range(piece.start, piece.stop):
            yield Ids(f"{piece.name}, document {document}", index.document(document), document)
    else:
        yield from _rows(piece, field)


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _json_lines(piece: Piece, field: str) -> Iterator[Text | str]:
    packed = piece.name.endswith(PACKED)
    with _opened(piece) as file:
        at, number = piece.start, 0
        if at:  # a line that begins before is the business of the piece before
            file.seek(at - 1)
            at += len(file.readline()) - 1
        while (packed or at < piece.stop) and (line := file.readline()):
            number += 1
            where = f"{piece.name}, byte {at}" if piece.start else f"{piece.name}, line {number}"
            if line.strip():
                yield Text(where, _field(line, field, where), number if packed else at)
            at += len(line)


def _opened(piece: Piece) -> BinaryIO:
    if piece.name.endswith(".gz"):
        return io.BufferedReader(gzip.open(piece.path, "rb"))  # type: ignore[arg-type]
    if piece.name.endswith(".zst"):
        return io.BufferedReader(_zstandard().open(piece.path, "rb"))
    return open(piece.path, "rb")


def _field(line: bytes, field: str, where: str) -> bytes:
    try:
        text = json.loads(line)[field]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        reason = f"has no field {field!r}" if isinstance(error, KeyError) else f"is no JSON object ({error})"
        raise UserError("--input", f"{where} {reason}", "repair it, or name the field with --field") from error
    if not isinstance(text, str):
        raise UserError("--input", f"{where}: {field!r} is no text", "name another field with --field")
    return text.encode(errors="replace")  # lone surrogates


def _rows(piece: Piece, field: str) -> Iterator[Text]:
    file = _parquet().ParquetFile(piece.path)
    if field not in file.schema_arrow.names:
        raise UserError("--field", f"{piece.name} has no column {field!r}",
                        f"it has {', '.join(file.schema_arrow.names)}")
    for row, text in enumerate(file.read_row_group(piece.start, columns=[field]).column(0)):
        if (content := text.as_py()) is not None:
            yield Text(f"{piece.name}, row {row} of group {piece.start}", str(content).encode(), row)


# As written by Megatron-LM's indexed_dataset.py and by datatrove: a number for each type of ids.
_MEGATRON_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


class _Index:
    """Megatron's .idx: sizes and places of sequences in the .bin beside it, and which of them make a document."""

    def __init__(self, path: Path):
        with open(path, "rb") as file:
            head = file.read(34)
        known = len(head) == 34 and head.startswith(b"MMIDIDX\0\0") and head[17] in _MEGATRON_DTYPES
        if not known:
            raise UserError("--input", f"{path} is no index of Megatron's with integer tokens", "remove it")
        _, code, sequences, documents = struct.unpack_from("<QBQQ", head, 9)
        raw = np.memmap(path, np.uint8, mode="r", offset=34)
        sizes, places, ends = 4 * sequences, 12 * sequences, 12 * sequences + 8 * documents
        if len(raw) < ends:
            raise UserError("--input", f"{path} is shorter than its head says", "replace it")
        self.sizes, self.places = raw[:sizes].view("<i4"), raw[sizes:places].view("<i8")
        self.first = raw[places:ends].view("<i8")  # of each document; the last entry is the end
        self.dtype = np.dtype(_MEGATRON_DTYPES[code]).newbyteorder("<")
        self.tokens = np.memmap(path.with_suffix(".bin"), np.uint8, mode="r")

    def document(self, number: int) -> np.ndarray:
        """Its ids."""
        sequences = range(self.first[number], self.first[number + 1])
        return np.concatenate([np.zeros(0, np.uint32), *(
            self.tokens[self.places[i]: self.places[i] + self.sizes[i] * self.dtype.itemsize].view(self.dtype)
            for i in sequences)]).astype(np.uint32)


@functools.lru_cache(maxsize=4)
def _index(path: Path, mtime_ns: int) -> _Index:
    """Once for each version of a file."""
    return _Index(path)


def _documents(name: str, path: Path, task_bytes: int) -> Iterator[Piece]:
    index = _index(path, path.stat().st_mtime_ns)
    ends = np.cumsum(index.sizes.astype(np.int64) * index.dtype.itemsize)
    before = np.concatenate([[0], ends])[index.first]  # bytes before each document, and in all
    start = 0
    while start < len(index.first) - 1:
        stop = int(np.searchsorted(before, before[start] + task_bytes, "right")) - 1
        stop = min(max(stop, start + 1), len(index.first) - 1)
        yield Piece(name, str(path), "megatron", start, stop, int(before[stop] - before[start]))
        start = stop


def content_hash(content: bytes) -> bytes:
    """16 bytes that stand for a document."""
    return hashlib.blake2b(content, digest_size=16).digest()


def _parquet() -> Any:
    return _extra("pyarrow.parquet", "Parquet files")


def _zstandard() -> Any:
    return _extra("zstandard", ".zst files")


def _extra(module: str, what: str, name: str = "data") -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError("--input", f"{what} need {module.partition('.')[0]}",
                        f"pip install 'jaxtrain[{name}]'") from error


def total_size(tasks: Iterable[tuple[Piece, ...]]) -> int:
    """Bytes of all tasks, as stored."""
    return sum(piece.size for task in tasks for piece in task)
