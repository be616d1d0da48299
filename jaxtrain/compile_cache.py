"""A compilation cache on disk in which each program has a checksum.

JAX loads whatever its cache folder holds: a single flipped byte made every start end with a segmentation fault (jaxlib
0.10, CPU), and an entry truncated by a full disk was never replaced.
"""

import contextlib
import hashlib
import os
import platform
import sys
from pathlib import Path

import jax
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from jaxtrain import atomic_files

_DIGEST = 32  # bytes of SHA-256, before the program
_of_jax = compilation_cache.get_file_cache


class CheckedCache(CacheInterface):
    """A folder of programs; a damaged one is removed and compiled again, one that cannot be written is skipped."""

    def __init__(self, folder: str | Path):
        """The folder is created with the first program."""
        self._path = Path(folder)

    def get(self, key: str) -> bytes | None:  # pyrefly: ignore[bad-override]
        """Return the program, or None if it is missing or damaged."""
        file = self._file(key)
        try:
            content = file.read_bytes()
        except OSError:
            return None
        digest, program = content[:_DIGEST], content[_DIGEST:]
        if program and hashlib.sha256(program).digest() == digest:
            return program
        print(f"warning: {file} is damaged; it is removed and compiled again", file=sys.stderr)
        with contextlib.suppress(OSError):
            file.unlink()
        return None

    def put(self, key: str, value: bytes) -> None:
        """Write a program atomically, also when several processes write the same one."""
        file = self._file(key)
        if file.exists():
            return
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            with atomic_files.written(file, durable=False) as out:
                out.write(hashlib.sha256(value).digest() + value)
        except OSError as error:
            print(f"warning: {file} cannot be written ({error.strerror}): the next start compiles again",
                  file=sys.stderr)

    def _file(self, key: str) -> Path:
        return self._path / f"{key}.program"


def install() -> None:
    """Make JAX use this cache, except for folders with a size limit and folders that are not local."""
    compilation_cache.get_file_cache = _file_cache


def _file_cache(path: str) -> tuple[CacheInterface, str] | None:
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
    install()
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla" / _processor()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = [line for line in lines if line.startswith(("model name", "flags", "Features"))][:2]
    except OSError:
        features = []
    return hashlib.sha256("\n".join([platform.machine(), platform.processor(), *features]).encode()).hexdigest()[:12]
