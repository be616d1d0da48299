"""Write files atomically: complete or absent, and durable across a power failure."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that appears at `path`, durable, when the block ends without error; another name until then."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


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
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
