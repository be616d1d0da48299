"""Files of tokens, as other programs write them: memory-mapped, and cut into stretches that hold whole documents.

    .idx and .bin      Megatron-LM: documents by number
    .ds and .ds.index  datatrove: documents by number
    .npy               numpy's header, or none (OLMo); documents by the id that ends them
    .bin               the header of llm.c and modded-nanogpt, or none (nanoGPT); documents by the id that ends them

What has no header needs its type of token named. Stretches are planned from heads and indexes: of a URL, tokens are
fetched when documents are read.
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
LONGEST = 2**27  # tokens of a document: with the wrong id for its end, a file would look like a single one
_HEADER = 256  # int32 of llm.c's header: what it is, its version, the number of tokens
_HEADED = {20240520: "<u2", 20240801: "<u4"}
# As written by Megatron-LM's indexed_dataset.py and by datatrove: a number for each type of ids.
_MEGATRON_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


class TokenFile(Protocol):
    """What is asked of a file."""

    dtype: np.dtype

    def stretches(self, size: int) -> Iterator[tuple[int, int, int]]:
        """(from, to, bytes) of stretches of about so many bytes."""
        ...

    def documents(self, start: int, stop: int, eod: int) -> Iterator[tuple[int, np.ndarray]]:
        """(place, ids without an end, as they are stored) of each document that begins in a stretch."""
        ...


def is_token_file(path: str) -> bool:
    """Whether documents are read from this file as tokens."""
    return path.endswith((".idx", ".bin", ".npy", ".ds"))


def is_beside(path: str) -> bool:
    """Whether this file is read by way of another."""
    stem, _, end = path.rpartition(".")
    return storage.exists(f"{stem}.idx") if end == "bin" else stem.endswith(".ds") and storage.exists(stem)


def files_of(path: str) -> list[str]:
    """All files that are read for one: itself, and what Megatron and datatrove have put into another."""
    stem, _, end = path.rpartition(".")
    return [path, *{"idx": [f"{stem}.bin"], "ds": [f"{path}.index"]}.get(end, [])]


def open_tokens(path: str, dtype: str = "") -> TokenFile:
    """Once for each version of its files; `dtype` is that of tokens without a header."""
    return _open(path, tuple(map(_stamp, files_of(path))), dtype)


def _stamp(path: str) -> int | str | None:
    try:
        return storage.stamp(path)
    except (OSError, storage.Gone):
        return None  # whoever reads it has the words for that


@functools.lru_cache(maxsize=4)
def _open(path: str, stamps: tuple[int | str | None, ...], dtype: str) -> TokenFile:
    if path.endswith(".idx"):
        return Megatron(path)
    return Datatrove(path) if path.endswith(".ds") else Raw(path, dtype)


class Raw:
    """Tokens end to end; one id stands between documents, before the first of them or behind the last."""

    def __init__(self, path: str, dtype: str):
        self.path = path
        self.dtype, self.offset, self.total = _head(path, dtype)

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """All of them."""
        return _map(self.path, self.dtype, self.offset)

    def stretches(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Of tokens."""
        step, total = max(1, size // self.dtype.itemsize), self.total
        for start in range(0, total, step):
            stop = min(start + step, total)
            yield start, stop, (stop - start) * self.dtype.itemsize

    def documents(self, start: int, stop: int, eod: int) -> Iterator[tuple[int, np.ndarray]]:
        """Those that begin in the stretch, the last one to its end."""
        # What begins before is the business of the stretch before.
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
                                "have no end", "name the token that ends them, and the tokenizer they were made with")
        if begin is not None and begin < len(self.tokens):
            yield begin, self.tokens[begin:]


def _head(path: str, dtype: str) -> tuple[np.dtype, int, int]:
    """-> the type of tokens, where they begin, and how many there are."""
    size = storage.size(path)
    head = storage.read(path, 0, min(size, 4 * _HEADER))
    if head.startswith(b"\x93NUMPY"):
        return _numpy_head(path, head, size)
    magic, _, total = np.frombuffer(head[:12], "<i4").tolist() if len(head) == 4 * _HEADER else (0, 0, 0)
    if path.endswith(".bin") and magic in _HEADED:
        found, offset = np.dtype(_HEADED[magic]), len(head)
        if size != offset + total * found.itemsize:
            raise UserError("--input", f"{path} has not the {total:,} tokens that its head says", "replace it")
    elif not dtype:
        raise UserError("--input", f"{path} has no header that says what its tokens are",
                        f"name their type with --token_dtype ({', '.join(TYPES)}), or take the file out")
    else:
        found, offset = np.dtype(dtype).newbyteorder("<"), 0
        if size % found.itemsize:
            raise UserError("--token_dtype", f"{path} has {size:,} bytes, which are no whole tokens of {dtype}",
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
        if size < file.tell() + shape[0] * dtype.itemsize:
            raise ValueError(f"{size:,} bytes are too few for {shape[0]:,} tokens")
    except ValueError as error:
        raise UserError("--input", f"{path} is no whole array ({error})", "replace it") from error
    return dtype, file.tell(), shape[0]


class Datatrove:
    """A .ds of tokens and the .index beside it: where each document ends."""

    def __init__(self, path: str):
        self.path, self.ends = path, _map(f"{path}.index", np.dtype("<u8"))
        if storage.exists(f"{path}.loss"):
            raise UserError("--input", f"{path}.loss says which tokens are not to be learnt, and that is not read",
                            "remove it to learn them all")
        total, size = int(self.ends[-1]) if len(self.ends) else 0, storage.size(path)
        width = size // total if total else 2
        if width not in (2, 4) or size != total * width:  # of nothing else does datatrove make files
            raise UserError("--input", f"{path} has {size:,} bytes and its index {total:,} tokens: they do not belong "
                            "together", "replace them")
        self.dtype = np.dtype(f"<u{width}")

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """All of them."""
        return _map(self.path, self.dtype)

    def stretches(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Of documents."""
        return _numbered(np.concatenate([[0], self.ends.astype(np.int64) * self.dtype.itemsize]), size)

    def documents(self, start: int, stop: int, eod: int) -> Iterator[tuple[int, np.ndarray]]:
        """By number."""
        begin = int(self.ends[start - 1]) if start else 0
        for number, end in enumerate(self.ends[start:stop].tolist(), start):
            yield number, _without_end(self.tokens[begin:end], eod)
            begin = end


class Megatron:
    """An .idx: sizes and places of sequences in the .bin beside it, and which of them make a document."""

    def __init__(self, path: str):
        _, self.bin = files_of(path)
        head = storage.read(path, 0, min(storage.size(path), 34))
        known = len(head) == 34 and head.startswith(b"MMIDIDX\0\0") and head[17] in _MEGATRON_TYPES
        if not known:
            raise UserError("--input", f"{path} is no index of Megatron's with integer tokens", "remove it")
        _, code, sequences, documents = struct.unpack_from("<QBQQ", head, 9)
        raw = _map(path, np.dtype(np.uint8), 34)
        sizes, places, ends = 4 * sequences, 12 * sequences, 12 * sequences + 8 * documents
        if len(raw) < ends:
            raise UserError("--input", f"{path} is shorter than its head says", "replace it")
        self.sizes, self.places = raw[:sizes].view("<i4"), raw[sizes:places].view("<i8")
        self.first = raw[places:ends].view("<i8")  # of each document; the last entry is the end
        self.dtype = np.dtype(_MEGATRON_TYPES[code]).newbyteorder("<")
        there = _size(self.bin)
        if sequences and there < self.places[-1] + self.sizes[-1] * self.dtype.itemsize:
            raise UserError("--input", f"{self.bin} is shorter than its index says", "replace it")

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """Their bytes."""
        return _map(self.bin, np.dtype(np.uint8))

    def stretches(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Of documents."""
        ends = np.cumsum(self.sizes.astype(np.int64) * self.dtype.itemsize)
        return _numbered(np.concatenate([[0], ends])[self.first], size)

    def documents(self, start: int, stop: int, eod: int) -> Iterator[tuple[int, np.ndarray]]:
        """By number."""
        for number in range(start, stop):
            parts = [self._sequence(i) for i in range(self.first[number], self.first[number + 1])]
            ids = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, self.dtype), *parts])
            yield number, _without_end(ids, eod)

    def _sequence(self, i: int) -> np.ndarray:
        place = self.places[i]
        return self.tokens[place: place + self.sizes[i] * self.dtype.itemsize].view(self.dtype)


def _numbered(before: np.ndarray, size: int) -> Iterator[tuple[int, int, int]]:
    """Stretches of documents, from the bytes before each and in all."""
    start, total = 0, len(before) - 1
    while start < total:
        stop = int(np.searchsorted(before, before[start] + size, "right")) - 1
        stop = min(max(stop, start + 1), total)
        yield start, stop, int(before[stop] - before[start])
        start = stop


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
        if local.stat().st_size <= offset:  # what is empty cannot be mapped
            return np.zeros(0, dtype)
        return np.asarray(np.memmap(local, dtype, mode="r", offset=offset))
    except ValueError as error:
        raise UserError("--input", f"{path} is cut short ({error})", "replace it") from error
    except OSError as error:
        raise UserError("--input", f"{path} cannot be read ({error.strerror})", "put it back") from error
