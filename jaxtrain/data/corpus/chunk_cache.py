"""A cache of bounded size on the local disk, shared by all processes of a machine.

It uses no locks between processes: files appear by a rename and vanish by an unlink, and a missing file is fetched
again. So a killed process leaves nothing that others would wait for. The least recently used files are evicted first.
"""

import os
import threading
import warnings
from pathlib import Path

from jaxtrain.files import atomic_files


class ChunkCache:
    """File contents by key, together at most `limit` bytes; a key must always mean the same content."""

    def __init__(self, folder: Path, limit: int):
        self._folder, self._limit = folder, limit
        self._lock = threading.Lock()
        self._coming = 0  # bytes that threads of this process are writing
        self._room = 0  # bytes that this process may write before it measures the folder again
        self._silent = False

    def read(self, key: str, start: int, stop: int) -> bytes | None:
        """Return bytes `start` to `stop` of a content, or None if it is not cached or too short."""
        try:
            handle = os.open(self._path(key), os.O_RDONLY)
        except OSError:
            return None
        try:
            os.utime(handle)  # marks it as recently used
            content = os.pread(handle, stop - start, start)
        except OSError:
            return None
        finally:
            os.close(handle)
        return content if len(content) == stop - start else None

    def write(self, key: str, content: bytes) -> None:
        """Store a content if the disk allows it; a failed write only costs time later."""
        path = self._path(key)
        try:
            self._make_room(len(content))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with atomic_files.written(Path(path), durable=False) as file:  # it is verified when first read
                file.write(content)
        except FileNotFoundError:
            pass  # another process evicted the file
        except OSError as error:
            if not self._silent:
                self._silent = True
                warnings.warn(f"data.cache_dir: {self._folder} cannot be written ({error.strerror}), so remote data "
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
        """Remove the least recently used files until the rest take at most `allowed` bytes."""
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
