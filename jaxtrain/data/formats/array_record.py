"""Read ArrayRecord files in ranges of records; a record is text, a JSON object, or a tf.train.Example.

The first record of a file decides which of these the file holds.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import parsed

NAME = re.compile(r"\.array_?record(-\d+-of-\d+)?$")
TOGETHER = 2**22  # bytes of stored records that are read at a time


def stretches(path: Path, size: int, module: ModuleType) -> Iterator[tuple[str, int, int, int]]:
    """Yield (text, json or example; from, to, size) of ranges of about `size` bytes, if records are equally long."""
    stored = path.stat().st_size
    with _opened(path, module) as reader:
        total = reader.num_records()
    step = max(1, total * size // stored)
    form = _form(next(records(path, 0, 1, module))[1]) if total else ""
    for start in range(0, total, step):
        stop = min(start + step, total)
        yield form, start, stop, stored * stop // total - stored * start // total


def records(path: Path, start: int, stop: int, module: ModuleType) -> Iterator[tuple[int, bytes]]:
    """Yield (number, content) of each record of a range."""
    with _opened(path, module) as reader:
        step = max(1, reader.num_records() * TOGETHER // path.stat().st_size)
        for at in range(start, stop, step):
            yield from enumerate(reader.read(at, min(at + step, stop)), at)


@contextmanager
def _opened(path: Path, module: ModuleType) -> Iterator[Any]:
    try:
        reader = module.ArrayRecordReader(str(path))
        if not reader.ok():  # otherwise it would just report no records
            raise UserError("--input", f"{path} is not a complete ArrayRecord file", "replace it")
        yield reader
        reader.close()
    except (RuntimeError, IndexError) as error:
        raise UserError("--input", f"{path} is corrupt ({error})", "replace it") from error


def _form(record: bytes) -> str:
    try:
        parsed(record)
        return "json"
    except ValueError:
        pass
    try:
        return "example" if features(record) else "text"
    except ValueError:
        return "text"


def features(record: bytes) -> dict[str, memoryview]:
    """Return a tf.train.Example's features by name; raise ValueError for any other content."""
    found = {}
    for message in _fields(memoryview(record)).get(1, []):
        for entry in _fields(message).get(1, []):
            parts = _fields(entry)
            found[bytes(parts[1][0]).decode() if 1 in parts else ""] = parts.get(2, [memoryview(b"")])[0]
    return found


def content(record: bytes, field: str, where: str) -> bytes:
    """Return the bytes of one feature of a tf.train.Example."""
    try:
        known = features(record)
        values = [value for some in _fields(known.get(field, memoryview(b""))).get(1, [])
                  for value in _fields(some).get(1, [])]
    except ValueError as error:
        raise UserError("--input", f"{where} is not a tf.train.Example, but the first record is", "fix it") from error
    if field not in known:
        raise UserError("--text_field", f"{where} has no feature {field!r}", f"it has {', '.join(sorted(known))}")
    if len(values) != 1:
        raise UserError("--text_field", f"{where}: {field!r} is not one string of bytes", "name another feature")
    return bytes(values[0])


def _fields(message: memoryview) -> dict[int, list[memoryview]]:
    """Return the fields of a protobuf message by number; all of them must be length-delimited."""
    found: dict[int, list[memoryview]] = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        length, at = _varint(message, at)
        if key & 7 != 2 or at + length > len(message):
            raise ValueError("not a message of messages and strings")
        found.setdefault(key >> 3, []).append(message[at: at + length])
        at += length
    return found


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return the varint at a place, and the place after it."""
    for size in range(1, 11):
        if at + size > len(message):
            break
        if message[at + size - 1] < 128:
            return sum((byte & 127) << 7 * i for i, byte in enumerate(message[at: at + size])), at + size
    raise ValueError("not a varint")
