"""Find the documents behind `data.source`, and assign each to the train or the eval split.

The split depends only on names and sizes, so every process on every machine computes the same one.
"""

import functools
import hashlib
import mmap
import os
import sysconfig
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import exceeds_memory

Split = Literal["train", "eval"]
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
_RECORDS = (".jsonl", ".ndjson", ".csv", ".tsv")  # text whose lines are not
_FIX = "name a folder or file of UTF-8 text, or use 'stdlib'"


@dataclass(frozen=True)
class Document:
    """A stretch of a text file that is one document."""

    name: str  # path relative to the source, with forward slashes
    path: Path
    start: int  # bytes
    stop: int
    sha256: str
    split: Literal["train", "eval"]

    def read(self) -> bytes:
        """Return the text; raise a UserError if the file was edited since it was listed."""
        text = _read(self.path, self.start, self.stop)
        if hashlib.sha256(text).hexdigest() != self.sha256:
            raise UserError("data.source", f"{self.path} changed while it was read", "run again")
        return text


def find_documents(source: str, eval_fraction: float) -> list[Document]:
    """Return the documents of "stdlib" (this interpreter's own library), a folder or one file, sorted by name.

    Several files are split by a hash of their names. A single one is cut at a line: its last part is for evaluation.
    """
    if source == "stdlib":
        root, files = _library()
    else:
        root = Path(source).expanduser().absolute()
        if not os.path.exists(root):  # Path.exists raises if a parent folder is not accessible
            raise UserError("data.source", f"{source!r} does not exist", _FIX)
        files = _walk(root) if root.is_dir() else [root]
        root = root if root.is_dir() else root.parent
    named = [(path.relative_to(root).as_posix(), path) for path in files]
    texts = [(name, path, stop, digest) for name, path in sorted(named) if (stop := _size(path))
             and (digest := _text_digest(path, 0, stop))]
    if not texts:
        raise UserError("data.source", f"{source!r} holds no text (binary, hidden and empty files do not count)", _FIX)
    from jaxtrain.data.formats.json_arrays import is_array_of_records

    if all(name.endswith(_RECORDS) or is_array_of_records(f"{path}", size) for name, path, size, _ in texts):
        raise UserError("data.source", f"{source!r} holds records ({texts[0][0]}), whose syntax would be trained on",
                        "make a corpus of their text with `jaxtrain prepare --input=... --output=...`, and name that")
    if len(texts) == 1:
        return _cut(*texts[0][:3], eval_fraction)
    split = _split([name for name, *_ in texts], eval_fraction)
    return [Document(name, path, 0, stop, digest, split[name]) for name, path, stop, digest in texts]


def _library() -> tuple[Path, list[Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    return root, [path for path in _walk(root, skip=_NOT_LIBRARY) if path.suffix == ".py"]


def _walk(root: Path, skip: Set[str] = frozenset()) -> list[Path]:
    found = []
    for folder, folders, files in os.walk(root, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return [path for path in found if os.path.isfile(path)]  # no sockets, pipes or dangling links


def _split(names: list[str], eval_fraction: float) -> dict[str, Split]:
    """Split names by their own hashes, so that adding a file moves no other; neither split is left empty."""
    rank = {name: int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8]) / 2**64 for name in names}
    split: dict[str, Split] = {name: "eval" if rank[name] < eval_fraction else "train" for name in names}
    split[min(names, key=rank.__getitem__)] = "eval"
    split[max(names, key=rank.__getitem__)] = "train"
    return split


def _cut(name: str, path: Path, size: int, eval_fraction: float) -> list[Document]:
    """Cut one file into a train and an eval document, at a line end past the train share if possible."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        wanted = min(max(int(size * (1 - eval_fraction)), 1), size - 1)
        at = text.find(b"\n", wanted - 1) + 1
        if not 0 < at < size:
            at = text.rfind(b"\n", 0, wanted) + 1 or wanted
        while 0 < at < size and text[at] & 0xC0 == 0x80:  # one long line: at least do not cut a character
            at -= 1
    if not 0 < at < size:
        raise UserError("data.source", f"{path} is too short to be cut into a train and an eval part", _FIX)
    parts: tuple[tuple[int, int, Split], ...] = ((0, at, "train"), (at, size, "eval"))
    return [Document(name, path, start, stop, _text_digest(path, start, stop) or "", split)
            for start, stop, split in parts]


def _size(path: Path) -> int:
    return path.stat().st_size


def _read(path: Path, start: int, stop: int) -> bytes:
    if exceeds_memory(stop - start):
        raise UserError("data.source", f"{path} has {stop - start:,} bytes, more than this machine's memory", "cut it "
                        "into files, make a corpus of them with `jaxtrain prepare`, and name that")
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(stop - start)
    except OSError as error:
        _unreadable(error)


def _unreadable(error: OSError) -> NoReturn:
    # Skipping it would silently train on other data than a process that can read it.
    raise UserError("data.source", f"{error.filename} cannot be read ({error.strerror})",
                    "make it readable or remove it") from error


def _text_digest(path: Path, start: int, stop: int) -> str | None:
    """Return the sha256 of a stretch of a file, or None if it is binary; cached for each version of the file."""
    return _digest_of_version(path, start, stop, path.stat().st_mtime_ns)


@functools.cache
def _digest_of_version(path: Path, start: int, stop: int, mtime_ns: int) -> str | None:
    text = _read(path, start, stop)
    try:
        text.decode()
    except UnicodeDecodeError:
        return None
    return None if b"\0" in text[:8192] else hashlib.sha256(text).hexdigest()
