"""Attention and grouped matmuls of jaxtrain, with their gradients, beside those of tokamax.

    python -m tools.device.accelerator_tokamax

tokamax is at https://github.com/openxla/tokamax; accelerator_wheels.sh fetches it. For packed documents it
takes a mask of every pair of tokens, where ours take the number of each token's document.
"""

import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.kernels.grouped_matmul import grouped_matmul
from jaxtrain.models.attention.self_attention import attend
from tools.device.accelerator_blocks import median_seconds

ATTENTION = {"124M": (64, 1024, 12, 12, 64), "1B": (16, 4096, 32, 8, 64), "8B": (4, 4096, 32, 8, 128)}
GROUPS = {"Qwen3-30B": (32768, 2048, 768, 128), "Mixtral": (16384, 4096, 14336, 8)}  # rows, widths, groups
TOYS = {"toy attention": (1, 128, 4, 2, 64)}, {"toy groups": (256, 128, 192, 4)}
Program = Callable[..., jax.Array]


def measured(few: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each measurement, and its milliseconds, or why it failed."""
    library, gpu = loaded(), jax.default_backend() == "gpu"
    kernel = "mosaic" if gpu else "xla"
    attention, groups = TOYS if few else (ATTENTION, GROUPS)
    for name, (rows, length, heads, keys, width) in attention.items():
        q, k, v = (jax.random.normal(jax.random.key(n), (rows, length, count, width), jnp.bfloat16)
                   for n, count in enumerate((heads, keys, keys)))
        starts = np.random.default_rng(0).random((rows, length)) < 4 / length
        segments = jnp.asarray(1 + np.cumsum(starts, 1), jnp.int32)
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
        theirs = partial(library.dot_product_attention, is_causal=True, implementation=kernel)
        yield from beside(f"attention of {name}, one document", (q, k, v), partial(attend, backend="auto"), theirs)
        yield from beside(f"attention of {name}, documents", (q, k, v),
                          partial(attend, segments_BT=segments, backend="auto"), partial(theirs, mask=mask))
    for name, (rows, width, wider, count) in groups.items():
        bounds = np.sort(np.random.default_rng(0).integers(0, rows + 1, count - 1))
        sizes = jnp.asarray(np.diff(bounds, prepend=0, append=rows), jnp.int32)
        x, w = (jax.random.normal(jax.random.key(n), shape, jnp.bfloat16)
                for n, shape in enumerate(((rows, width), (count, width, wider))))
        yield from beside(f"groups of {name}", (x, w), lambda x, w, sizes=sizes: grouped_matmul(x, w, sizes),
                          lambda x, w, sizes=sizes: library.ragged_dot(x, w, sizes, implementation=kernel))


def beside(name: str, given: tuple[jax.Array, ...], ours: Program, theirs: Program
           ) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the times of two programs, and how much the second one's numbers differ, of the largest element."""
    wanted = None
    for whose, program in (("ours", ours), ("tokamax", theirs)):
        found: dict[str, Any] = {}
        try:
            forward, both = jax.jit(program), jax.jit(partial(gradients, program))
            numbers = [np.asarray(one, np.float32) for one in both(*given)]
            found = {"forward_ms": 1e3 * median_seconds(partial(forward, *given), 5),
                     "both_ms": 1e3 * median_seconds(partial(both, *given), 5)}
            if wanted is not None:
                found["apart"] = max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9))
                                     for a, b in zip(numbers, wanted, strict=True))
            wanted = wanted or numbers
        except Exception as error:
            found["failed"] = f"{type(error).__name__}: {error}"[:200]
        yield f"{whose}: {name}", found


def gradients(program: Program, *given: jax.Array) -> tuple[jax.Array, ...]:
    """The result and its gradients by all that is given, from the result as cotangent."""
    out, pull = jax.vjp(program, *given)
    return out, *pull(out)


def loaded() -> Any:
    """Import tokamax, without the profiler that its own benchmarks need and no kernel does."""
    try:
        import xprof  # noqa: F401
    except ImportError:
        for name in ("xprof", "xprof.cli", "xprof.cli.tools"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["xprof.cli.tools"].__dict__["get_kernel_stats_tool"] = None
    import tokamax

    return tokamax


if __name__ == "__main__":
    for what, figures in measured(few=jax.default_backend() == "cpu"):
        print(what, figures)
