"""Write files atomically: readers, and whoever comes after a kill, find a file complete or not at all."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from jaxtrain.base.annotations import Json
from jaxtrain.files.bounded_files import opened

_ABANDONED_S = 600.0  # after so long without a change, a partial file that nobody has locked is deleted
_cleaned: set[Path] = set()  # folders that this process has looked through for such files


@contextmanager
def written(path: Path, *, durable: bool = True, shared: bool = True) -> Iterator[BinaryIO]:
    """Yield a file that appears at `path` when the block ends without error; it has another name until then.

    Args:
        path: where it appears, in place of what was there.
        durable: sync it to disk first, so that it survives a power failure.
        shared: several processes may write it at once, so each uses a name of its own. What a kill left of one is
            deleted when a process of the same machine first writes to this folder. Otherwise the name is always the
            same, and what a kill left is overwritten by the next attempt.
    """
    if shared:
        _delete_abandoned(path.parent)
    ending = f"{_machine()}{uuid.uuid4().hex[8:]}.partial" if shared else "tmp"
    partial = path.with_name(f"{path.name}.{ending}")
    try:
        with contextlib.ExitStack() as held:
            with open(partial, "wb") as file:
                if shared:
                    held.enter_context(_locked(file))
                yield file
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _machine() -> str:
    """Return eight hexadecimal digits that stand for this machine in the names of partial files."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


@contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """Lock a file within this context, even after it is closed; the kernel unlocks it if the process is killed."""
    handle = os.dup(file.fileno())
    try:
        with contextlib.suppress(OSError):  # some file systems cannot; there, no partial file is ever deleted
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _delete_abandoned(folder: Path) -> None:
    """Delete what killed processes of this machine left of shared files in a folder, once in a process.

    Only the lock tells whether a writer still lives, and some file systems lock only within a machine; hence no file of
    another machine is touched. A file that has just been created may not be locked yet; hence the age.
    """
    if folder in _cleaned:
        return
    _cleaned.add(folder)
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            if re.search(rf"\.{_machine()}[0-9a-f]{{24}}\.partial$", entry.name):
                with contextlib.suppress(OSError), open(entry.path, "r+b") as left:
                    if time.time() - os.fstat(left.fileno()).st_mtime > _ABANDONED_S:
                        fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(entry.path)


def write(path: Path, content: str, *, durable: bool = False) -> None:
    """Write a text file that only one process writes."""
    with written(path, durable=durable, shared=False) as file:
        file.write(content.encode())


def sync(folder: Path) -> None:
    """Sync a folder to disk, so that the names in it are durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Json) -> None:
    """Write readable JSON; equal content gives equal bytes."""
    with written(path) as file:
        file.write(json.dumps(content, indent=1).encode())


def digest(content: Json) -> str:
    """Return the sha256 of any content that JSON can represent."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 of a file."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
