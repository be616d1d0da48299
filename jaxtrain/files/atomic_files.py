"""Write files atomically: readers, and whoever comes after a kill, find a file complete or not at all."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from jaxtrain.files.bounded_files import opened


@contextmanager
def written(path: Path, *, durable: bool = True, shared: bool = True) -> Iterator[BinaryIO]:
    """Yield a file that appears at `path` when the block ends without error; it has another name until then.

    Args:
        path: where it appears, in place of what was there.
        durable: sync it to disk first, so that it survives a power failure.
        shared: several processes may write it at once, so each uses a name of its own. Otherwise the name is always the
            same, and what a kill left is overwritten by the next attempt.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial" if shared else f"{path.name}.tmp")
    try:
        with open(partial, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


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


def write_json(path: Path, content: Any) -> None:
    """Write readable JSON; equal content gives equal bytes."""
    with written(path) as file:
        file.write(json.dumps(content, indent=1).encode())


def digest(content: Any) -> str:
    """Return the sha256 of any content that JSON can represent."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 of a file."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
