"""Read token files of other programs: memory-mapped, and cut into ranges that hold whole documents.

    .idx and .bin      Megatron-LM: documents by number
    .ds and .ds.index  datatrove: documents by number
    .npy               numpy's header, or none (OLMo); documents by the id that ends them
    .bin               the header of llm.c and modded-nanogpt, or none (nanoGPT); documents by the id that ends them

The token dtype of files without a header must be given. Ranges are planned from headers and indexes; the tokens of a
remote file are fetched only when documents are read.
"""

import functools
import io
import struct
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from jaxtrain import storage
from jaxtrain.errors import UserError

TYPES = ("uint8", "uint16", "uint32", "int32", "uint64", "int64")
SCAN = 2**20  # tokens that are searched at a time
LONGEST = 2**27  # longest document in tokens: with a wrong end id, a file would look like a single document
_HEADER = 256  # int32 values of llm.c's header: magic number, version, number of tokens
_HEADED = {20240520: "<u2", 20240801: "<u4"}
# As written by Megatron-LM's indexed_dataset.py and by datatrove: a number for each dtype.
_MEGATRON_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


class TokenFile(Protocol):
    """The protocol of token files."""

    dtype: np.dtype

    def stretches(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield (from, to, bytes) of ranges of about `size` bytes."""
        ...

    def documents(self, start: int, stop: int, eod: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (place, stored ids without the end) of each document that begins in a range."""
        ...


def is_token_file(path: str) -> bool:
    """Return whether documents are read from this file as tokens."""
    return path.endswith((".idx", ".bin", ".npy", ".ds"))


def is_beside(path: str) -> bool:
    """Return whether this file is only a companion that is read together with another one."""
    stem, _, end = path.rpartition(".")
    return storage.exists(f"{stem}.idx") if end == "bin" else stem.endswith(".ds") and storage.exists(stem)


def files_of(path: str) -> list[str]:
    """Return all files that are read together with this one: itself, and Megatron's or datatrove's companion."""
    stem, _, end = path.rpartition(".")
    return [path, *{"idx": [f"{stem}.bin"], "ds": [f"{path}.index"]}.get(end, [])]


def open_tokens(path: str, dtype: str = "") -> TokenFile:
    """Open a token file, once for each version of its files; `dtype` applies to files without a header."""
    return _open(path, tuple(map(_stamp, files_of(path))), dtype)


def _stamp(path: str) -> int | str | None:
    try:
        return storage.stamp(path)
    except (OSError, storage.Gone):
        return None  # the reader reports this error


@functools.lru_cache(maxsize=4)
def _open(path: str, stamps: tuple[int | str | None, ...], dtype: str) -> TokenFile:
    if path.endswith(".idx"):
        return Megatron(path)
    return Datatrove(path) if path.endswith(".ds") else Raw(path, dtype)


class Raw:
    """Tokens end to end, with an id between documents, before the first of them or after the last."""

    def __init__(self, path: str, dtype: str):
        self.path = path
        self.dtype, self.offset, self.total = _head(path, dtype)

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """All tokens, memory-mapped."""
        return _map(self.path, self.dtype, self.offset)

    def stretches(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield ranges of tokens."""
        step, total = max(1, size // self.dtype.itemsize), self.total
        for start in range(0, total, step):
            stop = min(start + step, total)
            yield start, stop, (stop - start) * self.dtype.itemsize

    def documents(self, start: int, stop: int, eod: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the documents that begin in a range, the last one to its end."""
        # A document that begins earlier belongs to the range before.
        begin = start if start == 0 or self.tokens[start - 1] == eod else None
        longest = (start if begin is None else begin) + LONGEST
        for at in range(start, len(self.tokens), SCAN):
            for end in (at + np.flatnonzero(self.tokens[at: at + SCAN] == eod)).tolist():
                if begin is not None and begin < end:
                    yield begin, self.tokens[begin:end]
                begin, longest = end + 1, end + 1 + LONGEST
                if begin >= stop:
                    return
            if at + SCAN > longest:
                raise UserError("--eod", f"{self.path} has no id {eod} in {LONGEST:,} tokens, so that its documents "
                                "never end", "name the token that ends them, and the tokenizer they were made with")
        if begin is not None and begin < len(self.tokens):
            yield begin, self.tokens[begin:]


def _head(path: str, dtype: str) -> tuple[np.dtype, int, int]:
    """Return the dtype of the tokens, where they begin, and how many there are."""
    size = storage.size(path)
    head = storage.read(path, 0, min(size, 4 * _HEADER))
    if head.startswith(b"\x93NUMPY"):
        return _numpy_head(path, head, size)
    magic, _, total = np.frombuffer(head[:12], "<i4").tolist() if len(head) == 4 * _HEADER else (0, 0, 0)
    if path.endswith(".bin") and magic in _HEADED:
        found, offset = np.dtype(_HEADED[magic]), len(head)
        if size != offset + total * found.itemsize:
            raise UserError("--input", f"{path} does not have the {total:,} tokens that its header says", "replace it")
    elif not dtype:
        raise UserError("--input", f"{path} has no header with the type of its tokens",
                        f"name their type with --token_dtype ({', '.join(TYPES)}), or remove the file from the input")
    else:
        found, offset = np.dtype(dtype).newbyteorder("<"), 0
        if size % found.itemsize:
            raise UserError("--token_dtype", f"{path} has {size:,} bytes, not a whole number of {dtype} tokens",
                            "name another type")
    return found, offset, (size - offset) // found.itemsize


def _numpy_head(path: str, head: bytes, size: int) -> tuple[np.dtype, int, int]:
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if len(shape) != 1 or dtype.kind not in "iu":
            raise UserError("--input", f"{path} has {len(shape)} dimensions of {dtype}",
                            "tokens are one dimension of integers; remove it")
        if not 0 <= shape[0] <= (size - file.tell()) // dtype.itemsize:
            raise ValueError(f"{size:,} bytes are too few for {shape[0]:,} tokens")
    except ValueError as error:
        raise UserError("--input", f"{path} is not a complete array ({error})", "replace it") from error
    return dtype, file.tell(), shape[0]


class Datatrove:
    """A .ds file of tokens, and the .index next to it with the end of each document."""

    def __init__(self, path: str):
        self.path, self.ends = path, _map(f"{path}.index", np.dtype("<u8"))
        if storage.exists(f"{path}.loss"):
            raise UserError("--input", f"{path}.loss is a loss mask, which is not supported",
                            "remove it to train on all tokens")
        total, size = int(self.ends[-1]) if len(self.ends) else 0, storage.size(path)
        width = size // total if total else 2
        if width not in (2, 4) or size != total * width or not _rises(self.ends):  # datatrove writes no other dtypes
            raise UserError("--input", f"{path} has {size:,} bytes and its index {total:,} tokens: they do not belong "
                            "together", "replace them")
        self.dtype = np.dtype(f"<u{width}")

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """All tokens, memory-mapped."""
        return _map(self.path, self.dtype)

    def stretches(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield ranges of documents."""
        return _numbered(np.concatenate([[0], self.ends.astype(np.int64) * self.dtype.itemsize]), size)

    def documents(self, start: int, stop: int, eod: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield documents by number."""
        begin = int(self.ends[start - 1]) if start else 0
        for number, end in enumerate(self.ends[start:stop].tolist(), start):
            yield number, _without_end(self.tokens[begin:end], eod)
            begin = end


class Megatron:
    """An .idx file with sizes and places of sequences in the .bin next to it, grouped into documents."""

    def __init__(self, path: str):
        _, self.bin = files_of(path)
        head = storage.read(path, 0, min(storage.size(path), 34))
        known = len(head) == 34 and head.startswith(b"MMIDIDX\0\0") and head[17] in _MEGATRON_TYPES
        if not known:
            raise UserError("--input", f"{path} is not a Megatron index with integer tokens", "remove it")
        _, code, sequences, documents = struct.unpack_from("<QBQQ", head, 9)
        raw = _map(path, np.dtype(np.uint8), 34)
        sizes, places, ends = 4 * sequences, 12 * sequences, 12 * sequences + 8 * documents
        if len(raw) < ends:
            raise UserError("--input", f"{path} is shorter than its header declares", "replace it")
        self.sizes, self.places = raw[:sizes].view("<i4"), raw[sizes:places].view("<i8")
        self.first = raw[places:ends].view("<i8")  # sequence of each document; the last entry is the end
        self.dtype = np.dtype(_MEGATRON_TYPES[code]).newbyteorder("<")
        there = _size(self.bin)
        lengths = self.sizes.astype(np.int64) * self.dtype.itemsize
        if len(lengths) and (lengths.min() < 0 or self.places.min() < 0):
            raise UserError("--input", f"{path} has sequences with a negative size or place", "replace it")
        if (self.places > there - lengths).any():
            raise UserError("--input", f"{self.bin} is shorter than its index declares", "replace it")
        if (len(self.first) and not 0 <= self.first[0] <= self.first[-1] <= sequences) or not _rises(self.first):
            raise UserError("--input", f"{path} has documents of sequences that are not there", "replace it")

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """The bytes of all tokens, memory-mapped."""
        return _map(self.bin, np.dtype(np.uint8))

    def stretches(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield ranges of documents."""
        ends = np.cumsum(self.sizes.astype(np.int64) * self.dtype.itemsize)
        return _numbered(np.concatenate([[0], ends])[self.first], size)

    def documents(self, start: int, stop: int, eod: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield documents by number."""
        for number in range(start, stop):
            parts = [self._sequence(i) for i in range(self.first[number], self.first[number + 1])]
            ids = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, self.dtype), *parts])
            yield number, _without_end(ids, eod)

    def _sequence(self, i: int) -> np.ndarray:
        place = self.places[i]
        return self.tokens[place: place + self.sizes[i] * self.dtype.itemsize].view(self.dtype)


def _numbered(before: np.ndarray, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of documents of about `size` bytes; `before[i]` is the bytes before document i."""
    start, total = 0, len(before) - 1
    while start < total:
        stop = int(np.searchsorted(before, before[start] + size, "right")) - 1
        stop = min(max(stop, start + 1), total)
        yield start, stop, int(before[stop] - before[start])
        start = stop


def _rises(numbers: np.ndarray) -> bool:
    return bool((numbers[1:] >= numbers[:-1]).all())


def _without_end(ids: np.ndarray, eod: int) -> np.ndarray:
    return ids[:-1] if len(ids) and ids[-1] == eod else ids


def _size(path: str) -> int:
    try:
        return storage.size(path)
    except OSError as error:
        raise UserError("--input", f"{path} cannot be read ({error.strerror})", "put it back") from error


def _map(path: str, dtype: np.dtype, offset: int = 0) -> np.ndarray:
    try:
        local = storage.here(path)
        if local.stat().st_size <= offset:  # an empty file cannot be mapped
            return np.zeros(0, dtype)
        return np.asarray(np.memmap(local, dtype, mode="r", offset=offset))
    except ValueError as error:
        raise UserError("--input", f"{path} is cut short ({error})", "replace it") from error
    except OSError as error:
        raise UserError("--input", f"{path} cannot be read ({error.strerror})", "put it back") from error
