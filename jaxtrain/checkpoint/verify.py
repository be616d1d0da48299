"""Whether a checkpoint is whole: its files are those that were there when it was read back, and its arrays those saved.

A checkpoint that was read back after it was written has a `good.json`: the size and sha256 of every file, the
fingerprint of every array, and what was saved beside them. Without a valid one a checkpoint is not good.
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
from typing import Any, TypeVar

import numpy as np

from jaxtrain.checkpoint import fingerprint

Record = dict[str, Any]
Problems = list[str]
Share = tuple[int, int]  # (i, n): every n-th, from the i-th on

MARK = "good.json"
ALL: Share = (0, 1)
_AGAIN_S = (0.2, 1.0, 4.0)  # storage that fails for a moment is asked again after so many seconds
_SEEN_S = 60.0  # what one process has written the others see after so many seconds, wherever they are
_READERS = 8  # files hashed at a time
_PIECE_BYTES = 1 << 28  # of an array, read at a time


def steps(directory: str | Path) -> list[int]:
    """The committed checkpoints, good or not, in order. (Orbax renames a folder to its step when it is complete.)"""
    try:
        names = [entry.name for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)]
    except OSError:  # not there, or not for us, which is told when it is written
        return []
    return sorted(int(name) for name in names if name.isdecimal() and name.isascii())


def good(directory: str | Path, step: int) -> Record | None:
    """What `good.json` says of a step, if it is there and is itself whole; does not look at the other files."""
    with contextlib.suppress(OSError, ValueError):
        return read_mark(directory, step)
    return None


def verify(directory: str | Path, step: int) -> Problems:
    """Everything that is wrong with a checkpoint, each as a phrase that names the file or array; reads all of it."""
    folder = Path(directory) / str(step)
    try:
        record = read_mark(directory, step)
    except FileNotFoundError:
        record = None
    except (OSError, ValueError) as error:
        return [f"{MARK} {reason(error)}"]
    problems = [] if record is None else compare_files(folder, record, *list_files(folder))
    return problems or read_back(folder, step)[1]


def read_mark(directory: str | Path, step: int) -> Record:
    """The content of `good.json`; raises OSError or ValueError if it cannot be that of this step."""
    return parse_mark(_patiently((Path(directory) / str(step) / MARK).read_bytes), step)


def parse_mark(sealed: bytes, step: int) -> Record:
    """The same, of its bytes."""
    record = json.loads(sealed)
    if not isinstance(record, dict) or sealed != _sealed({k: v for k, v in record.items() if k != "sha256"}):
        raise ValueError("is not what was written")
    if record["step"] != step:
        raise ValueError(f"is that of step {record['step']}")
    return record


def write_mark(directory: str | Path, step: int, record: Record) -> None:
    """Make the checkpoint good: from here on it survives a power cut."""
    folder = Path(directory) / str(step)
    temporary = folder / (MARK + ".tmp")

    def write():
        with open(temporary, "wb") as file:
            file.write(_sealed({"step": step, **record}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / MARK)
        for path in (folder, folder.parent):
            entry = os.open(path, os.O_RDONLY)
            try:
                os.fsync(entry)
            finally:
                os.close(entry)

    _patiently(write)


def list_files(folder: Path) -> tuple[list[str], Problems]:
    """The plain files of a checkpoint but for `good.json`, in order; and what is neither file nor folder."""
    files, problems = [], []

    def walk(at: str, prefix: str):
        for entry in sorted(os.scandir(at), key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                walk(entry.path, f"{prefix}{entry.name}/")
            elif not entry.is_file(follow_symlinks=False):
                problems.append(f"{prefix}{entry.name} is no plain file")
            elif prefix or entry.name not in (MARK, MARK + ".tmp"):
                files.append(prefix + entry.name)

    try:
        _patiently(lambda: (files.clear(), problems.clear(), walk(str(folder), "")))
    except OSError as error:
        problems.append(f"{_inside(folder, error)} {reason(error)}")
    return files, problems


def unseen(folder: Path, files: list[str]) -> str | None:
    """The first of these files that is not to be seen here, after a minute of looking; None: all are."""
    end = time.monotonic() + _SEEN_S
    for name in files:
        while not os.path.lexists(folder / name):
            if time.monotonic() > end:
                return name
            time.sleep(0.5)
            with contextlib.suppress(OSError):
                os.listdir((folder / name).parent)  # makes a client of NFS ask its server
    return None


def compare_files(folder: Path, record: Record, files: list[str], problems: Problems, *, share: Share = ALL,
                  hashes: bool = True) -> Problems:
    """What is wrong with this share of the recorded files; names and sizes, and unless told otherwise sha256."""
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
        except OSError as error:
            return f"{name} {reason(error)}"
        return None

    mine = itertools.islice(recorded, share[0], None, share[1])
    with ThreadPoolExecutor(_READERS) as pool:  # a run waits for this
        return problems + [wrong for wrong in pool.map(check, (name for name in mine if name in files)) if wrong]


def hash_file(path: Path) -> tuple[int, str]:
    """Its size and sha256."""
    def read():
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore

    return _patiently(read)


def saved_fingerprint(folder: Path) -> dict[str, tuple[str, str]]:
    """For every array what it is, such as float32[4, 16], and its fingerprint on the devices it was saved from."""
    return read_json(folder / "fingerprint" / "metadata")["arrays"]


def saved_meta(folder: Path) -> dict[str, Any]:
    """What was saved beside the state."""
    return read_json(folder / "meta" / "metadata")


def read_json(path: Path) -> Any:
    """One of the JSON files of a checkpoint."""
    return json.loads(_patiently(path.read_bytes))


def read_back(folder: Path, step: int, share: Share = ALL, go_on: Callable[[], bool] = lambda: True,
              ) -> tuple[dict[str, tuple[int, int]], Problems]:
    """Read this share of a checkpoint's arrays, a piece at a time -> the words of what was read, and what is wrong.

    With the whole share the words are compared with what was saved, else that is for who adds up all shares.
    """
    try:
        for name in ("_CHECKPOINT_METADATA", "meta/metadata", "state/_METADATA", "state/_sharding"):
            read_json(folder / name)
        if (found := read_json(folder / "fingerprint" / "metadata")["step"]) != step:
            return {}, [f"it is the checkpoint of step {found}"]
        saved = saved_fingerprint(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {}, [f"{_inside(folder, error)} {reason(error)}"]
    words: dict[str, tuple[int, int]] = {}
    problems = []
    turn = itertools.count()
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
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, InterruptedError):
                raise
            problems.append(f"array {path} {reason(error)}")
    if share == ALL and not problems:
        problems = compare_words(saved, [words])
    return words, problems


def compare_words(saved: dict[str, tuple[str, str]], shares: list[dict[str, tuple[int, int]]]) -> Problems:
    """Which arrays, of which all shares together were read, are not those that were saved."""
    found = fingerprint.total(shares)
    return [f"array {path} has other content than when it was saved" for path, (_, was) in saved.items()
            if found.get(path) != was]


def _open(state: Path, path: str):
    import tensorstore

    store = {"driver": "ocdbt", "base": f"file://{state}", "path": f"{path}/"}
    return tensorstore.open({"driver": "zarr", "kvstore": store}, open=True, read=True).result()


def _pieces(array) -> Iterator[tuple[slice, ...]]:
    """Slices that cover an array, each a whole number of its chunks along the first dimension where they are small."""
    sizes = list(array.chunk_layout.read_chunk.shape or ())  # None: of a scalar
    room = _PIECE_BYTES // max(1, array.dtype.numpy_dtype.itemsize)
    for dimension, (size, whole) in reversed(list(enumerate(zip(sizes, array.shape, strict=True)))):
        others = int(np.prod([n for i, n in enumerate(sizes) if i != dimension]))
        sizes[dimension] = min(whole, size * max(1, room // max(1, size * others)))
    yield from itertools.product(*([slice(i, min(i + size, whole)) for i in range(0, whole, max(1, size))]
                                   for size, whole in zip(sizes, array.shape, strict=True)))


T = TypeVar("T")


def _patiently(do: Callable[[], T]) -> T:
    """Do it again a few times when storage fails in a way that may pass."""
    for seconds in _AGAIN_S:
        try:
            return do()
        except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError):
            raise
        except (OSError, RuntimeError):
            time.sleep(seconds)
    return do()


def _sealed(record: Record) -> bytes:
    """As text that ends with its own sha256."""
    body = json.dumps(record, sort_keys=True)
    seal = hashlib.sha256(body.encode()).hexdigest()
    return (json.dumps({**json.loads(body), "sha256": seal}) + "\n").encode()


def reason(error: BaseException) -> str:
    """Why a file is not what it should be, as a phrase behind its name."""
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror or error})"
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "is not valid JSON"
    text = f"{error}".splitlines()[0][:200] if str(error) else type(error).__name__
    return text if type(error) is ValueError and text.startswith("is ") else f"cannot be read ({text})"


def _inside(folder: Path, error: BaseException) -> str:
    name = getattr(error, "filename", None)
    with contextlib.suppress(ValueError, TypeError):
        return str(Path(name).relative_to(folder)) if name and Path(name) != folder else "the folder"
    return "its metadata"
