"""A cache of bounded size on the local disk, shared by all processes of a machine.

Nobody waits for anybody: a file appears whole, by a rename, and vanishes by an unlink, and whoever misses one fetches
it again. So a kill leaves nothing that could hang others, and what has not been used for the longest goes first.
"""

import os
import threading
import uuid
import warnings
from contextlib import suppress
from pathlib import Path


class ChunkCache:
    """Contents by key (a name that may stand for nothing else, ever); together at most `limit` bytes."""

    def __init__(self, folder: Path, limit: int):
        self._folder, self._limit = folder, limit
        self._lock = threading.Lock()
        self._coming = 0  # bytes that threads of this process are writing
        self._room = 0  # what this process may write until it looks again at what all have written
        self._silent = False

    def read(self, key: str, start: int, stop: int) -> bytes | None:
        """Bytes of a content; None: it is not here, or not as long."""
        try:
            handle = os.open(self._path(key), os.O_RDONLY)
        except OSError:
            return None
        try:
            os.utime(handle)  # used now
            content = os.pread(handle, stop - start, start)
        except OSError:
            return None
        finally:
            os.close(handle)
        return content if len(content) == stop - start else None

    def write(self, key: str, content: bytes) -> None:
        """Keep it, if the disk lets us: a cache that cannot be written only costs time."""
        path = self._path(key)
        partial = f"{path}.{uuid.uuid4().hex}.partial"
        try:
            self._make_room(len(content))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(partial, "wb") as file:
                file.write(content)
            os.replace(partial, path)  # not synced: whoever reads it first checks it
        except FileNotFoundError:
            pass  # somebody needed the room
        except OSError as error:
            with suppress(OSError):
                os.unlink(partial)
            if not self._silent:
                self._silent = True
                warnings.warn(f"data.cache_dir: {self._folder} cannot be written ({error.strerror}), so what is read "
                              "is fetched again each time", stacklevel=2)
        finally:
            with self._lock:
                self._coming -= len(content)

    def _path(self, key: str) -> str:
        return f"{self._folder}/{key[:2]}/{key}"

    def _make_room(self, size: int) -> None:
        with self._lock:
            self._coming += size
            if size > self._room:
                # An eighth stays free for what other processes write meanwhile.
                self._evict(self._limit - self._limit // 8 - self._coming)
                self._room = max(size, self._limit // 256)
            self._room -= size

    def _evict(self, allowed: int) -> None:
        """Remove files, the longest unused first, until the rest is small enough."""
        files = []
        for folder in _entries(self._folder):
            for entry in _entries(folder.path):
                try:
                    stat = entry.stat()
                except FileNotFoundError:
                    continue
                files.append((stat.st_mtime_ns, stat.st_size, entry.path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= allowed:
                return
            Path(path).unlink(missing_ok=True)
            total -= size


def _entries(folder: Path | str) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
