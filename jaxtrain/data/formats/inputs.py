"""Read documents from text, JSON lines, Parquet, ArrayRecord and token files, cut into tasks of bounded size.

The tasks depend only on names and sizes: they are the same on every machine, for any number of workers.
"""

import dataclasses
import functools
import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from jaxtrain import storage
from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.data.formats import array_record, parquet_pages, token_files, zstd
from jaxtrain.data.formats.conversations import FIELDS, Unusable, example_of, format_of
from jaxtrain.data.formats.json_arrays import is_array_of_records
from jaxtrain.errors import UserError, install_extra
from jaxtrain.files.bounded_files import exceeds_memory, parsed

JSONL = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")
PACKED = (".gz", ".zst")
RECORDS = ("jsonl", "parquet", "records json")  # kinds of pieces that may hold more than text
RECORD_BYTES = 2**28  # of the longest line or row that is read
RATIO = 1000  # text is not compressed as much
LEVELS = 4  # bytes in memory for each value in a list, even null: where its lists begin and which of them it is in
ROWS = 1024  # of a table that are read at a time
FIX = "name files or folders of text, .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .array_record or tokens"


@dataclass(frozen=True)
class Piece:
    """A part of one file: bytes, JSON lines (those that begin in it), row groups, records or tokens."""

    name: str  # path relative to its input, with forward slashes
    path: str
    kind: str  # text, jsonl, parquet, records and their form, tokens and their type
    start: int
    stop: int
    size: int  # stored size of the part, in bytes
    split: str = ""  # "eval" if all of it is for evaluation; "": a hash of each document decides

    def identity(self) -> JsonObject:
        """Return what identifies the piece, independent of where it is stored."""
        return {key: value for key, value in asdict(self).items() if key != "path" and (key != "split" or value)}


@dataclass(frozen=True)
class Text:
    """One document of text."""

    name: str  # the piece, and the place within it
    content: bytes  # UTF-8; for records other than text, a conversations.Example as bytes
    place: int = 0  # the byte or (compressed) line where it begins, its row in the group, its number, or 0
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)  # requested further fields


@dataclass(frozen=True)
class Ids:
    """One document that is already tokenised."""

    name: str
    ids: np.ndarray  # without an end-of-document id
    place: int = 0  # its number, or the token where it begins


def find_tasks(inputs: str | Sequence[str], task_bytes: int = 2**26, token_dtype: str = "") -> list[tuple[Piece, ...]]:
    """Return all pieces in order of input and name, cut into tasks; small neighbours share a task."""
    named = [inputs] if isinstance(inputs, str | Path) else inputs
    for source in named:
        _refuse_arrays(str(source))
    pieces = find_pieces(inputs, task_bytes, token_dtype)
    if not pieces:
        found = [name for source in named for name, _, _ in _files(str(source))]
        what = "has no files" if not found else "is empty" if len(found) == 1 else f"has {len(found)} files, all empty"
        raise UserError("--input", f"{', '.join(map(str, named))} {what}", FIX)
    return cut([(piece,) for piece in pieces], task_bytes)


def _refuse_arrays(source: str) -> None:
    """Refuse .json files with an array of records each, which would silently become one document of text each.

    In a folder with more of other things, such as code, they are text.
    """
    files = _files(source)
    half = sum(size for *_, size in files) / 2
    if sum(size for name, _, size in files if name.lower().endswith(".json")) <= half:
        return  # without a look into any of them
    found = [(name, size) for name, path, size in files if is_array_of_records(path, size)]
    if sum(size for _, size in found) > half:
        (name, _), *others = found
        is_one = f"and {len(others)} more in {source} are each one" if others else "is one"
        raise UserError("--input", f"{name} {is_one} JSON array of records, and records are read one a line",
                        f"convert {'each' if others else 'it'} (jq -c '.[]' {name} > {name}l), and give "
                        f"{'the new files' if others else 'that file'}")


def task_bytes_of(inputs: str | Sequence[str]) -> int:
    """Return how much input makes a task: so little that many workers are busy, and a function of the input alone."""
    inputs = [inputs] if isinstance(inputs, str | Path) else inputs
    total = sum(size for source in inputs for _, _, size in _files(str(source)))
    return min(2**26, max(2**20, total // 32))


def find_pieces(inputs: str | Sequence[str], task_bytes: int, token_dtype: str = "",
                ends: str | tuple[str, ...] = "") -> list[Piece]:
    """Return the pieces in order of input and name, only of files whose names end with `ends`, in any case.

    With `ends`, empty files are pieces, too: their readers count them as damaged.
    """
    inputs = [inputs] if isinstance(inputs, str | Path) else inputs
    return [piece for source in inputs for name, path, size in _files(str(source)) if name.lower().endswith(ends)
            for piece in _pieces(name, path, size, task_bytes, token_dtype, bool(ends))]


def cut(groups: Iterable[tuple[Piece, ...]], task_bytes: int) -> list[tuple[Piece, ...]]:
    """Group pieces into tasks, keeping groups whole and in order; a group larger than a task gets its own."""
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


def _files(source: str) -> list[tuple[str, str, int]]:
    """Return the name, path or URL, and size of each file."""
    if storage.is_url(source):
        return [(file.name, file.path, file.size) for file in storage.find(source)]
    root = Path(source).expanduser()
    if not root.exists():
        raise UserError("--input", f"{source} does not exist", "name existing files or folders")
    if root.is_file():
        return [(root.name, str(root), root.stat().st_size)]
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted((path.relative_to(root).as_posix(), str(path), path.stat().st_size)
                  for path in found if path.is_file())


def _pieces(name: str, path: str, size: int, task_bytes: int, token_dtype: str, empty: bool) -> Iterator[Piece]:
    if name.lower().endswith(".parquet"):
        groups = parquet_file(path).metadata
        for i in range(groups.num_row_groups):
            yield Piece(name, path, "parquet", i, i + 1, groups.row_group(i).total_byte_size)
    elif array_record.NAME.search(name):
        for form, start, stop, stored in array_record.stretches(storage.here(path), task_bytes, _array_record()):
            yield Piece(name, path, f"records {form}", start, stop, stored)
    elif token_files.is_beside(path):
        return
    elif token_files.is_token_file(path):
        tokens = token_files.open_tokens(path, token_dtype)
        for start, stop, stored in tokens.stretches(task_bytes):
            yield Piece(name, path, f"tokens {tokens.dtype.name}", start, stop, stored)
    elif name.endswith(JSONL):
        # Compressed files cannot be read from the middle.
        step = max(size, 1) if name.endswith(PACKED) else task_bytes
        for start in range(0, size, step):
            yield Piece(name, path, "jsonl", start, min(start + step, size), min(step, size - start))
    elif size or empty:
        yield Piece(name, path, "text", 0, size, size)


def read(piece: Piece, field: str, eod: int | None = None, beside: Sequence[str] = (),
         form: str = "text", most: int = RECORD_BYTES) -> Iterator[Text | Ids | str]:
    """Yield a piece's documents in order; a string instead of one says why it was dropped.

    A record without text is an error. `eod` is the id that ends documents in token files; without it these are skipped.
    `beside` names further fields of a record to return with its text if it has them. `form` is one of
    conversations.FORMATS. A line of more than `most` bytes is dropped, whatever a compressed file makes of a few.
    """
    if form != "text" and piece.kind not in RECORDS:
        if not piece.start:  # once per file
            yield f"{piece.name}: no records"
    elif piece.kind == "text":
        is_binary = b"\0" in storage.read(piece.path, 0, min(piece.stop, 8192))
        if not is_binary and exceeds_memory(piece.stop):  # a sparse file has any size
            yield f"{piece.name}: larger than this machine's memory"
        elif is_binary or not is_utf8(content := storage.read(piece.path)):
            yield f"{piece.name}: not UTF-8 text"
        else:
            yield Text(piece.name, content)
    elif piece.kind == "jsonl":
        yield from _json_lines(piece, field, beside, form, most)
    elif piece.kind.startswith("records"):
        yield from _records(piece, field, beside, form)
    elif piece.kind.startswith("tokens"):
        if eod is not None:
            tokens = token_files.open_tokens(piece.path, piece.kind.split()[1])
            for place, ids in tokens.documents(piece.start, piece.stop, eod):
                yield Ids(piece.name, ids, place)
    else:
        yield from _rows(piece, field, beside, form, most)


def is_utf8(content: bytes) -> bool:
    """Return whether bytes are valid UTF-8."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _json_lines(piece: Piece, field: str, beside: Sequence[str], form: str, most: int) -> Iterator[Text | str]:
    packed = piece.name.endswith(PACKED)
    with _opened(piece) as file:
        at, number = piece.start, 0
        if at:  # a line that begins earlier belongs to the piece before
            file.seek(at - 1)
            at += _skip_line(file, piece.stop - at) - 1
        while (packed or at < piece.stop) and (line := file.readline(most + 1)):
            number += 1
            if len(line) > most:
                yield f"{piece.name}: a line of more than {most:,} bytes"
                at += len(line) + (0 if line.endswith(b"\n") else _skip_line(file, None if packed else piece.stop - at))
                continue
            where = f"{piece.name}, byte {at}" if piece.start else f"{piece.name}, line {number}"
            if line.strip():
                place = number if packed else at
                if form == "text":
                    content, record = _fields(line, field, where, beside)
                    yield Text(where, content, place, record)
                else:
                    yield _example(_record(line, where), form, where, place, beside)
            at += len(line)


def _skip_line(file: BinaryIO, enough: int | None) -> int:
    """Read to the end of a line, or until so many bytes have passed; return how many these were."""
    passed = 0
    while part := file.readline(2**20):
        passed += len(part)
        if part.endswith(b"\n") or (enough is not None and passed > enough):
            break
    return passed


def _opened(piece: Piece) -> BinaryIO:
    if piece.name.endswith(".gz"):
        return io.BufferedReader(gzip.open(storage.open(piece.path), "rb"))  # type: ignore[arg-type]
    if piece.name.endswith(".zst"):
        return zstd.opened(storage.open(piece.path), extra("zstandard", ".zst"))
    return storage.open(piece.path)


def _record(line: bytes, where: str) -> Json:
    try:
        return parsed(line, object)
    except ValueError as error:
        raise UserError("--input", f"{where} is not a JSON object ({error})", "repair it") from error


def _example(record: Json, form: str, where: str, place: int, beside: Sequence[str]) -> Text | str:
    try:
        content = example_of(record, form, where)
        return Text(where, content, place, {key: record[key] for key in beside if key in record})
    except Unusable as reason:
        return f"{where}: {reason}"


def _fields(line: bytes, field: str, where: str, beside: Sequence[str]) -> tuple[bytes, JsonObject]:
    try:
        record = parsed(line, object)
        text = record[field]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        reason = f"has no field {field!r}" if isinstance(error, KeyError) else f"is not a JSON object ({error})"
        raise UserError("--input", f"{where} {reason}", "repair it, or name the field with --text_field") from error
    if not isinstance(text, str):
        raise UserError("--input", f"{where}: {field!r} is not text", "name another field with --text_field")
    content = text.encode(errors="replace")  # lone surrogates
    return content, {name: record[name] for name in beside if name in record}


def find_format(tasks: Iterable[tuple[Piece, ...]], field: str, most: int = RECORD_BYTES) -> str:
    """Return the format of the first record of the input."""
    for piece in (piece for task in tasks for piece in task):
        if piece.kind == "parquet":
            return format_of(set(parquet_file(piece.path).schema_arrow.names), field, piece.name)
        if piece.kind in RECORDS:
            with readable(piece.path):
                line = _first(piece, most)
            record = _record(line, f"{piece.name}, its first record,")
            return format_of(set(record) if isinstance(record, dict) else set(), field, piece.name)
    return "text"


def _first(piece: Piece, most: int) -> bytes:
    if piece.kind != "jsonl":
        return next(array_record.records(storage.here(piece.path), 0, 1, _array_record()))[1]
    with _opened(piece) as file:
        lines = iter(lambda: file.readline(most + 1), b"")
        line = next((line for line in lines if line.strip()), b"{}")
        return line if len(line) <= most else b"{}"  # it will be dropped


def _rows(piece: Piece, field: str, beside: Sequence[str], form: str, most: int) -> Iterator[Text | str]:
    file = parquet_file(piece.path)
    names = file.schema_arrow.names
    columns = [name for name in dict.fromkeys([*(FIELDS[form] if form != "text" else [field]), *beside])
               if name in names]
    if _inflates(piece, file, columns, most):
        yield f"{piece.name}: a row group that is compressed more than {RATIO:,} to 1, to over {most:,} bytes"
        return
    if form != "text":
        records = (record for batch in _batches(piece, columns, file) for record in batch.to_pylist())
        for row, record in enumerate(records):
            yield _example(_without_null(record), form, f"{piece.name}, row {row} of group {piece.start}", row, beside)
        return
    if field not in names:
        raise UserError("--text_field", f"{piece.name} has no column {field!r}", f"it has {', '.join(names)}")
    beside = [name for name in beside if name in names and name != field]
    if str(file.schema_arrow.field(field).type) in ("string", "large_string", "binary", "large_binary"):
        file = parquet_file(piece.path, [field])
    rows = (row for batch in _batches(piece, [field, *beside], file)
            for row in zip(*(batch[name] for name in [field, *beside]), strict=True))
    for row, (text, *others) in enumerate(rows):
        where, content = f"{piece.name}, row {row} of group {piece.start}", text.as_py()
        content = content.encode() if isinstance(content, str) else content
        if content is None:
            yield f"{piece.name}: no text"
        elif not isinstance(content, bytes):
            raise UserError("--input", f"{where}: {field!r} is not text", "name another field with --text_field")
        elif not is_utf8(content):
            yield f"{piece.name}: not UTF-8 text"
        else:
            yield Text(where, content, row, {name: other.as_py() for name, other in zip(beside, others, strict=True)})


def _records(piece: Piece, field: str, beside: Sequence[str], form: str) -> Iterator[Text | str]:
    kind = piece.kind.split()[1]
    for number, content in array_record.records(storage.here(piece.path), piece.start, piece.stop, _array_record()):
        where, record = f"{piece.name}, record {number}", {}
        if form != "text":
            yield _example(_record(content, where), form, where, number, beside)
            continue
        if kind == "json":
            content, record = _fields(content, field, where, beside)
        elif kind != "text":
            content = array_record.content(content, field, where)
        yield Text(where, content, number, record) if is_utf8(content) else f"{piece.name}: not UTF-8 text"


def _without_null(value: object) -> Json:
    """Remove null values: Parquet has every field of a struct in every row."""
    if isinstance(value, dict):
        return {key: _without_null(one) for key, one in value.items() if one is not None}
    return [_without_null(one) for one in value] if isinstance(value, list) else value


def content_hash(content: bytes | memoryview) -> bytes:
    """Return a 16-byte hash that identifies a document."""
    return hashlib.blake2b(content, digest_size=16).digest()


def _inflates(piece: Piece, file: Any, names: Sequence[str], most: int) -> bool:
    """Return whether a column of a row group takes more than a record may, and is compressed more than text.

    What counts is what the pages say: the footer can be wrong. A row can consist of a list of nulls that take no space.
    """
    group = file.metadata.row_group(piece.start)
    for i in range(group.num_columns):
        column = group.column(i)
        if not any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in names):
            continue
        size, values = 0, 0
        for page in _pages(piece.path, column):
            size, values = size + page.size, values + page.values
        if file.schema.column(i).max_repetition_level:
            size = max(size, LEVELS * values)
        if size > max(most, RATIO * column.total_compressed_size):
            return True
    return False


def _pages(path: str, column: Any) -> list[parquet_pages.Page]:
    first = min(offset for offset in (column.dictionary_page_offset, column.data_page_offset) if offset)
    stop = first + column.total_compressed_size
    with readable(path, parquet_pages.Damaged):
        if not 0 < first <= stop <= storage.size(path):
            raise parquet_pages.Damaged("a column lies outside of the file")
        return list(parquet_pages.pages(functools.partial(storage.read, path), first, stop))


def _batches(piece: Piece, columns: list[str], file: Any) -> Iterator[Any]:
    """Yield a row group's columns some rows at a time."""
    with readable(piece.path, extra("pyarrow", "Parquet").ArrowException):
        yield from file.iter_batches(ROWS, row_groups=[piece.start], columns=columns)


def parquet_file(path: str, as_dictionary: Sequence[str] = ()) -> Any:
    """Open a Parquet file with pyarrow; values of these columns that repeat are stored once in memory, too."""
    # A plain path is faster than a file object.
    parquet = extra("pyarrow.parquet", "Parquet")
    with readable(path, extra("pyarrow", "Parquet").ArrowException):
        return parquet.ParquetFile(storage.open(path) if storage.is_url(path) else path,
                                   read_dictionary=list(as_dictionary))


def row_group(piece: Piece, columns: list[str], file: Any = None) -> Any:
    """Return some columns of a piece of Parquet, from an open `file` if given."""
    file = file or parquet_file(piece.path)
    if _inflates(piece, file, columns, RECORD_BYTES):
        raise UserError("--input", f"{piece.path} is compressed more than {RATIO:,} to 1, to over {RECORD_BYTES:,} "
                        "bytes", "write it with smaller row groups, or remove it")
    with readable(piece.path, extra("pyarrow", "Parquet").ArrowException):
        return file.read_row_group(piece.start, columns=columns)


def _array_record() -> ModuleType:
    return extra("array_record.python.array_record_module", "ArrayRecord files")


def extra(module: str, what: str, key: str = "--input", group: str = "data") -> Any:
    """Import a module of an optional package; if it is missing, raise a UserError that names the extra."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(key, f"{what} needs {module.partition('.')[0]}", install_extra(group)) from error


@contextmanager
def readable(path: str, *others: type[Exception]) -> Iterator[None]:
    """Turn read errors into a UserError that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error, *others) as error:
        raise UserError("--input", f"{path} cannot be read ({error})", "replace the file") from error


def stamps(task: Iterable[Piece]) -> list[Json]:
    """Return values that change if the input of a task changes."""
    found = []
    for piece in task:
        with readable(piece.path):
            found.append([piece.identity(), *map(storage.stamp, token_files.files_of(piece.path))])
    return found


def total_size(tasks: Iterable[tuple[Piece, ...]]) -> int:
    """Return the stored size of all tasks in bytes."""
    return sum(piece.size for task in tasks for piece in task)
