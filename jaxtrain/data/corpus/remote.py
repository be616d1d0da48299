"""Read a corpus from object storage: small files are copied to the cache folder, tokens are fetched in chunks on use.

Each chunk is verified against its checksum in the manifest before use, both when it is fetched and when this process
first finds it in the cache.
"""

import functools
import hashlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from jaxtrain import storage
from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.corpus.chunk_cache import ChunkCache
from jaxtrain.data.corpus.corruption import Damage, Lost
from jaxtrain.data.corpus.shard_writer import CHUNK
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files, bounded_files
from jaxtrain.files.safe_names import Outside, inside
from jaxtrain.redaction import redacted

THREADS = 16  # concurrent requests, since each waits for the network
AGAIN = 3  # attempts to fetch a chunk that arrives corrupt
FIX = "publish the corpus again, or set data.corrupt=skip_and_count"


class RemoteColumn:
    """The numbers in a remote object, fetched and sliced like a memory map of a file."""

    def __init__(self, url: str, dtype: np.dtype, length: int, crc32: str, sha256: str, cache: ChunkCache, spare: bool):
        self.damage = Damage(redacted(url), dtype, length, crc32)
        self._url, self._sha256, self._cache, self._spare = url, sha256, cache, spare
        self._checked: set[int] = set()  # cached chunks that this process has verified
        self._lock, self._coming = threading.Lock(), dict[int, Future]()

    def __len__(self) -> int:
        return self.damage.length

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, _ = where.indices(len(self))
        numbers = self.damage.chunks(start, stop) if stop > start else range(0)
        start, stop = start * self.damage.dtype.itemsize, stop * self.damage.dtype.itemsize
        parts = [self._part(n, max(start - n * CHUNK, 0), min(stop - n * CHUNK, CHUNK)) for n in numbers]
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), self.damage.dtype)

    def _part(self, number: int, start: int, stop: int) -> bytes:
        if number in self.damage.bad:
            raise Lost(self.damage.name)
        key = f"{self._sha256}-{number}"
        if number in self._checked and (part := self._cache.read(key, start, stop)) is not None:
            return part
        with self._lock:
            theirs = self._coming.get(number)
            ours = self._coming.setdefault(number, Future())
        if theirs:
            return theirs.result()[start:stop]
        try:
            ours.set_result(self._whole(number, key))
        except BaseException as error:
            ours.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._coming[number]
        return ours.result()[start:stop]

    def _whole(self, number: int, key: str) -> bytes:
        first, last = self.damage.edges(number)
        content = self._cache.read(key, 0, last - first)
        if content is None or not self.damage.intact(number, content):
            content = self._fetch(number, first, last)
            self._cache.write(key, content)
        self._checked.add(number)
        return content

    def _fetch(self, number: int, first: int, last: int) -> bytes:
        for _ in range(AGAIN):
            content = storage.read(self._url, first, last)
            if self.damage.intact(number, content):
                return content
        if self._spare:
            self.damage.add([number])
            raise Lost(self.damage.name)
        raise UserError("data.source", f"{self._url} is corrupt: bytes {first} to {last} are not what its manifest "
                        f"says, fetched {AGAIN} times", FIX)


@functools.lru_cache
def _chunks(folder: Path, limit: int) -> ChunkCache:
    """Return the chunk cache of a folder; all sources of a process share it and its size limit."""
    return ChunkCache(folder, limit)


class Store:
    """A corpus behind a URL whose small files are copied to a local folder."""

    def __init__(self, url: str, manifest: JsonObject, cache: Path | None, cache_bytes: int, spare: bool):
        if not cache:
            raise UserError("data.source", f"{url} is remote and needs a cache folder", "pass one as cache")
        self._url, self._spare = url, spare
        self._sizes = {found.name: found.size for found in storage.find(url)}
        self._chunks = _chunks(cache / "chunks", cache_bytes)
        self.folder = cache / "remote" / manifest["sha256"][:32]
        wanted: list[tuple[str, str]] = [
            (name, sha256) for split in manifest["splits"].values() for shard in split["shards"]
            for name, sha256 in shard["sha256"].items() if name.endswith((".offsets.npy", ".origins.npy"))]
        if file := manifest["tokenizer"]["file"]:
            if "sha256" not in manifest["tokenizer"]:
                raise UserError("data.source", f"the manifest of {url} is of an earlier version and has no hash of its "
                                "tokenizer", "prepare the corpus again, and publish it")
            wanted.append((file, manifest["tokenizer"]["sha256"]))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(lambda one: self._fetch(*one), wanted))
            atomic_files.write_json(self.folder / "manifest.json", manifest)
        except OSError as error:
            raise UserError("data.cache_dir", f"{self.folder} cannot be written ({error.strerror or error})",
                            "name a writable folder with room, here or in $JAXTRAIN_CACHE") from error

    def column(self, shard: JsonObject, name: str, dtype: np.dtype) -> RemoteColumn:
        """Return a column of a shard; a missing or truncated object is an error, or marked as corrupt."""
        column = RemoteColumn(storage.join(self._url, name), dtype, shard["tokens"], shard["crc32"][name],
                              shard["sha256"][name], self._chunks, self._spare)
        size, there = shard["tokens"] * dtype.itemsize, self._sizes.get(name, -1)
        if there != size and not self._spare:
            what = "is not there" if there < 0 else f"has {there} bytes instead of {size}"
            raise UserError("data.source", f"{storage.join(self._url, name)} {what}", FIX)
        column.damage.add(n for n in column.damage.chunks(0, len(column)) if column.damage.edges(n)[1] > there)
        return column

    def _fetch(self, name: str, sha256: str) -> None:
        try:
            path = inside(self.folder, name)
        except Outside as error:
            raise UserError("data.cache_dir", str(error), "remove the link") from error
        if path.exists() and atomic_files.file_digest(path) == sha256:
            return
        for _ in range(AGAIN):
            try:
                content = storage.read_small(storage.join(self._url, name), bounded_files.LARGE)
            except bounded_files.Refused as error:
                raise UserError("data.source", f"{storage.join(self._url, name)}: {error.strerror}",
                                "publish the corpus again, with smaller shards") from None
            if hashlib.sha256(content).hexdigest() == sha256:
                with atomic_files.written(path) as file:
                    file.write(content)
                return
        raise UserError("data.source", f"{storage.join(self._url, name)} is corrupt: its sha256 is not the manifest's",
                        "publish the corpus again")
