"""Verify a checkpoint: its files are those recorded when it was read back, and its arrays those that were saved.

A checkpoint that was read back after writing has a `good.json`: the size and sha256 of every file, the fingerprint of
every array, and the metadata saved with them. Without a valid `good.json` a checkpoint is not good. It protects against
accidents, not against people: whoever may write the files can write a `good.json` that fits them.
"""

import contextlib
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import LARGE, Form, opened, parsed, read, read_json, reason
from jaxtrain.files.safe_names import parts_of

Record = JsonObject
Problems = list[str]
Share = tuple[int, int]  # (i, n): every n-th item, starting with the i-th

MARK = "good.json"
ALL: Share = (0, 1)
# What is read of `good.json` and of the fingerprint's file.
_RECORD = {"step": int, "sha256": str, "files": {str: (int, str)}, "fingerprint?": {str: (str, str)}, "meta?": dict}
_FINGERPRINT = {"step": int, "arrays": {str: (str, str)}}
_AGAIN_S = (0.2, 1.0, 4.0)  # seconds before each retry when storage fails temporarily
_SEEN_S = 60.0  # seconds after which all processes see what one has written, wherever they run
_READERS = 8  # files hashed at a time
_PIECE_BYTES = 1 << 28  # bytes of an array read at a time


def steps(directory: str | Path) -> list[int]:
    """Return the committed steps, good or not, in order.

    (Orbax renames a folder to its step when it is complete.)
    """
    try:
        names = [entry.name for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)]
    except OSError:  # missing or not readable, which is reported when it is written
        return []
    return sorted(int(name) for name in names if name.isdecimal() and name.isascii())


def good(directory: str | Path, step: int) -> Record | None:
    """Return the content of a step's `good.json`, or None if it is missing or invalid; checks no other files."""
    with contextlib.suppress(OSError, ValueError):
        return read_mark(directory, step)
    return None


def verify(directory: str | Path, step: int, seen: Callable[[int], object] = lambda size: None) -> Problems:
    """Return everything wrong with a checkpoint, as phrases that name the file or array; reads all of it.

    `seen` is called, from any thread, with the bytes of each file and of each piece of an array that was read.
    """
    folder = Path(directory) / str(step)
    try:
        record = read_mark(directory, step)
    except FileNotFoundError:
        record = None
    except (OSError, ValueError) as error:
        return [f"{MARK} {reason(error)}"]
    listed = list_files(folder)
    problems = listed[1] if record is None else compare_files(folder, record, *listed, seen=seen)
    return problems or read_back(folder, step, seen=seen)[1]


def read_mark(directory: str | Path, step: int) -> Record:
    """Return the content of `good.json`; raises OSError or ValueError if it is not a valid one of this step."""
    return parse_mark(_patiently(lambda: read(Path(directory) / str(step) / MARK, LARGE)), step)


def parse_mark(sealed: bytes, step: int) -> Record:
    """Parse the bytes of a `good.json`; raises ValueError if they are not a valid one of this step."""
    record = parsed(sealed, _RECORD)
    if sealed != _sealed({k: v for k, v in record.items() if k != "sha256"}):
        raise ValueError("is not what was written")
    for found in (record["step"], record.get("meta", {}).get("step", step)):
        if found != step:
            raise ValueError(f"is that of step {found}")
    for name in record["files"]:
        parts_of(name)
    return record


def write_mark(directory: str | Path, step: int, record: Record) -> None:
    """Write `good.json` durably, which marks the checkpoint good even after a power failure."""
    folder = Path(directory) / str(step)

    def write():
        with atomic_files.written(folder / MARK, shared=False) as file:
            file.write(_sealed({"step": step, **record}))
        for path in (folder, folder.parent):
            atomic_files.sync(path)

    _patiently(write)


def list_files(folder: Path) -> tuple[list[str], Problems]:
    """Return the plain files of a checkpoint except `good.json`, in order, and what is neither file nor folder."""
    files, problems = [], []

    def walk(at: str, prefix: str):
        for entry in sorted(os.scandir(at), key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                walk(entry.path, f"{prefix}{entry.name}/")
            elif not entry.is_file(follow_symlinks=False):
                problems.append(f"{prefix}{entry.name} is not a plain file")
            elif prefix or entry.name not in (MARK, MARK + ".tmp"):
                files.append(prefix + entry.name)

    try:
        _patiently(lambda: (files.clear(), problems.clear(), walk(str(folder), "")))
    except OSError as error:
        problems.append(f"{_inside(folder, error)} {reason(error)}")
    return files, problems


def unseen(folder: Path, files: list[str]) -> str | None:
    """Return the first of these files that is not visible here after a minute, or None if all are."""
    end = time.monotonic() + _SEEN_S
    for name in files:
        while not os.path.lexists(folder / name):
            if time.monotonic() > end:
                return name
            time.sleep(0.5)
            with contextlib.suppress(OSError):
                os.listdir((folder / name).parent)  # makes an NFS client ask its server
    return None


def compare_files(folder: Path, record: Record, files: list[str], problems: Problems, *, share: Share = ALL,
                  hashes: bool = True, seen: Callable[[int], object] = lambda size: None) -> Problems:
    """Return what is wrong with this share of the recorded files, by name, size and, with `hashes`, sha256."""
    recorded, problems = record["files"], list(problems)
    problems += [f"{name} does not belong to it" for name in files if name not in recorded]
    problems += [f"{name} is missing" for name in recorded if name not in files]

    def check(name: str) -> str | None:
        size, sha256 = recorded[name]
        try:
            found = _patiently((folder / name).lstat).st_size
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if hashes and hash_file(folder / name)[1] != sha256:
                return f"{name} has other content than when it was saved"
            seen(size)
        except OSError as error:
            return f"{name} {reason(error)}"
        return None

    mine = itertools.islice(recorded, share[0], None, share[1])
    with ThreadPoolExecutor(_READERS) as pool:  # a starting run waits for this
        return problems + [wrong for wrong in pool.map(check, (name for name in mine if name in files)) if wrong]


def hash_file(path: Path) -> tuple[int, str]:
    """Return a file's size and sha256."""
    def read():
        with opened(path) as file:
            return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore

    return _patiently(read)


def saved_fingerprint(folder: Path) -> dict[str, tuple[str, str]]:
    """Return, for every array, its dtype and shape, such as float32[4, 16], and its fingerprint on the devices."""
    return _read(folder / "fingerprint" / "metadata", _FINGERPRINT)["arrays"]


def saved_meta(folder: Path) -> JsonObject:
    """Return the metadata saved with the state."""
    return _read(folder / "meta" / "metadata")


def _read(path: Path, form: Form = dict) -> Json:
    """Read one of the JSON files of a checkpoint."""
    return _patiently(lambda: read_json(path, form, LARGE))


def read_back(folder: Path, step: int, share: Share = ALL, go_on: Callable[[], bool] = lambda: True,
              seen: Callable[[int], object] = lambda size: None) -> tuple[dict[str, tuple[int, int]], Problems]:
    """Read this share of a checkpoint's arrays, piece by piece; return the fingerprint sums, and what is wrong.

    With the whole share the sums are compared with those saved; otherwise the caller adds up all shares and compares.
    """
    from jaxtrain.checkpoint import fingerprint  # imports JAX, which listing a run's checkpoints does without

    try:
        for name in ("_CHECKPOINT_METADATA", "meta/metadata", "state/_METADATA", "state/_sharding"):
            _read(folder / name)
        recorded = _read(folder / "fingerprint" / "metadata", _FINGERPRINT)["step"]
        for found in (recorded, {**saved_meta(folder)}.get("step", step)):
            if found != step:
                return {}, [f"it is the checkpoint of step {found}"]
        saved = saved_fingerprint(folder)
    except (OSError, ValueError) as error:
        return {}, [f"{_inside(folder, error)} {reason(error)}"]
    words: dict[str, tuple[int, int]] = {}
    problems, turn = [], itertools.count()
    for path, (what, _) in saved.items():
        try:
            array = _patiently(lambda path=path: _open(folder / "state", path))
            found = f"{np.dtype(array.dtype.numpy_dtype).name}{list(array.shape)}"
            if found != what:
                problems.append(f"array {path} is {found} instead of {what}")
                continue
            for piece in _pieces(array):
                if not go_on():
                    raise InterruptedError("it was stopped")
                if next(turn) % share[1] == share[0]:
                    content = _patiently(lambda array=array, piece=piece: array[piece].read().result())
                    start = [part.start for part in piece]
                    words[path] = fingerprint.add(words.get(path, (0, 0)),
                                                  fingerprint.of_piece(content, start, array.shape))
                    seen(content.nbytes)
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, InterruptedError):
                raise
            problems.append(f"array {path} {reason(error)}")
    if share == ALL and not problems:
        problems = compare_words(saved, [words])
    return words, problems


def compare_words(saved: dict[str, tuple[str, str]], shares: list[dict[str, tuple[int, int]]]) -> Problems:
    """Return which arrays differ from those that were saved; all shares together must cover every array."""
    from jaxtrain.checkpoint import fingerprint

    found = fingerprint.total(shares)
    return [f"array {path} has other content than when it was saved" for path, (_, was) in saved.items()
            if found.get(path) != was]


def _open(state: Path, path: str):
    import tensorstore

    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{state}/"}, "path": f"{path}/"}
    return tensorstore.open({"driver": "zarr", "kvstore": store}, open=True, read=True).result()


def _pieces(array) -> Iterator[tuple[slice, ...]]:
    """Yield slices that cover an array, aligned to its chunks, with small chunks grouped along the first dimension."""
    sizes = list(array.chunk_layout.read_chunk.shape or ())  # None for a scalar
    room = _PIECE_BYTES // max(1, array.dtype.numpy_dtype.itemsize)
    for dimension, (size, whole) in reversed(list(enumerate(zip(sizes, array.shape, strict=True)))):
        others = int(np.prod([n for i, n in enumerate(sizes) if i != dimension]))
        sizes[dimension] = min(whole, size * max(1, room // max(1, size * others)))
    yield from itertools.product(*([slice(i, min(i + size, whole)) for i in range(0, whole, max(1, size))]
                                   for size, whole in zip(sizes, array.shape, strict=True)))


T = TypeVar("T")


def _patiently(do: Callable[[], T]) -> T:
    """Call a function, with a few retries if storage fails in a way that may be temporary."""
    for seconds in _AGAIN_S:
        try:
            return do()
        except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError):
            raise
        except (OSError, RuntimeError):
            time.sleep(seconds)
    return do()


def _sealed(record: Record) -> bytes:
    """Return a record as JSON text that ends with its own sha256."""
    body = json.dumps(record, sort_keys=True)
    seal = hashlib.sha256(body.encode()).hexdigest()
    return (json.dumps({**json.loads(body), "sha256": seal}) + "\n").encode()


def _inside(folder: Path, error: BaseException) -> str:
    name = getattr(error, "filename", None)
    with contextlib.suppress(ValueError, TypeError):
        return str(Path(name).relative_to(folder)) if name and Path(name) != folder else "the folder"
    return "its metadata"
