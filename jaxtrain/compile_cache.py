"""A compilation cache on disk in which each program has a checksum.

JAX loads whatever its cache folder holds. There a flipped bit can crash every start, or silently change the loss, and a
truncated program is never replaced; docs/decisions.md has the measurement.
"""

import hashlib
import os
import platform
from pathlib import Path

import jax
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from jaxtrain.files import atomic_files

_DIGEST = 32  # bytes of SHA-256, before the program
_of_jax = compilation_cache.get_file_cache


class CheckedCache(CacheInterface):
    """A folder of programs; JAX warns of errors that it raises, and compiles the program."""

    def __init__(self, folder: str | Path):
        """The folder is created with the first program."""
        self._path = Path(folder)

    def get(self, key: str) -> bytes | None:  # pyrefly: ignore[bad-override]
        """Return the program, or None if it is missing; raises ValueError if it is damaged."""
        try:
            content = self._file(key).read_bytes()
        except FileNotFoundError:
            return None
        digest, program = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(program).digest() != digest:
            raise ValueError(f"{self._file(key)} is damaged; it is compiled again and replaced")
        return program

    def put(self, key: str, value: bytes) -> None:
        """Write a program atomically, also when several processes write the same one; replaces a damaged one."""
        self._path.mkdir(parents=True, exist_ok=True)
        with atomic_files.written(self._file(key), durable=False) as file:
            file.write(hashlib.sha256(value).digest() + value)

    def _file(self, key: str) -> Path:
        return self._path / f"{key}.program"


def _file_cache(path: str) -> tuple[CacheInterface, str] | None:
    """Return this cache, except for folders with a size limit and folders that are not local."""
    if getattr(jax.config, "jax_compilation_cache_max_size", -1) >= 0 or "://" in str(path):
        return _of_jax(path)
    return CheckedCache(path), path


def cache_dir() -> Path:
    """Return the cache directory: $JAXTRAIN_CACHE, or ~/.cache/jaxtrain."""
    return Path(os.environ.get("JAXTRAIN_CACHE") or Path.home() / ".cache" / "jaxtrain")


def enable_compilation_cache() -> None:
    """Cache compiled programs between runs, unless JAX has a folder configured (JAX_COMPILATION_CACHE_DIR).

    XLA's own key leaves out the CPU's features, and a program compiled for another machine may crash: so there is one
    folder per CPU. (For accelerators the key includes the topology.)
    """
    compilation_cache.get_file_cache = _file_cache
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla" / processor()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def processor() -> str:
    """Return a hash of the features of this machine's CPU, on which programs for it depend."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = [line for line in lines if line.startswith(("model name", "flags", "Features"))][:2]
    except OSError:
        features = [platform.processor()]
    return hashlib.sha256("\n".join([platform.machine(), *features]).encode()).hexdigest()[:12]
