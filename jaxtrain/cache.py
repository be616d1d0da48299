"""Where things are kept between runs: tokenised data and compiled programs."""

import hashlib
import os
import platform
from pathlib import Path

import jax


def cache_dir() -> Path:
    """$JAXTRAIN_CACHE, or ~/.cache/jaxtrain."""
    return Path(os.environ.get("JAXTRAIN_CACHE") or Path.home() / ".cache" / "jaxtrain")


def enable_compilation_cache() -> None:
    """Keep compiled programs for the next start, unless JAX was already told where to (JAX_COMPILATION_CACHE_DIR).

    XLA's own key leaves out the CPU's features, and a program of another machine may crash: so one folder per CPU. (Of
    accelerators it has the topology.)
    """
    from jaxtrain import programs

    programs.install()
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
