"""The results and gradients, in float64, that a kernel of grouped matmuls must give before `auto` may choose it.

    python -m tools.device.grouped_conformance [--backend=mosaic] [--large]

runs the cases on this machine's device, twice each: other bits the second time are a race. Sizes of groups, odd bounds,
and what lies behind the last group are where kernels were silently wrong.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxtrain.base.annotations import AnyArray
from jaxtrain.kernels import grouped_matmul

GROUPED = tuple[jax.Array, jax.Array, jax.Array]  # the product, and its gradients by rows and weights
# Largest error relative to the largest element: sums are in float32, and results are rounded once.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclass(frozen=True)
class Case:
    """Rows in groups of these sizes; `behind` is what the rows behind the last group hold."""

    sizes: tuple[int, ...]
    rows: int = 256
    width: int = 128
    wider: int = 192
    behind: float | None = None  # None: numbers as all others
    zeros: bool = False  # in rows, weights and gradients


CASES = {  # most of them of five groups, so that one compiled program serves them
    "even groups": Case((64, 64, 64, 32, 32)),
    "empty groups first, between and last": Case((0, 100, 0, 156, 0)),
    "one huge group among empty ones": Case((0, 256, 0, 0, 0)),
    "no row in any group": Case((0, 0, 0, 0, 0)),
    "a single row in each group": Case((1, 1, 1, 1, 1)),
    "bounds beside multiples of 64": Case((63, 2, 62, 66, 63)),
    "bounds beside multiples of 128": Case((127, 2, 126, 0, 1)),
    "bounds at 8, which vectors of 16 bytes allow": Case((8, 120, 72, 40, 16)),
    "rows behind the last group": Case((70, 0, 58, 1, 60)),
    "rows behind the last group are not finite": Case((64, 0, 30, 0, 0), behind=float("nan")),
    "zeros": Case((100, 28, 0, 64, 64), zeros=True),
    "a single group": Case((200,), width=64, wider=64),
    "more groups than tiles": Case((3, 0, 5, 1, 0, 9, 2, 0, 0, 4, 1, 1, 0, 7, 30, 2) * 2, width=64, wider=64),
    "odd numbers of rows and widths": Case((70, 0, 25, 4, 0), rows=100, width=40, wider=136),
}
LARGE = {  # many blocks of threads at once; for devices
    "experts of Qwen3-30B": Case((1500, 0, 3, 900, 4097, 127, 1, 2500) * 2, rows=20480, width=2048, wider=768),
    "experts of Mixtral": Case((4000, 1, 4095, 6000), rows=16384, width=4096, wider=3584),
}


def arrays(case: Case, dtype: DTypeLike, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return rows, weights, sizes, and the gradient of the product."""
    rng = np.random.default_rng(seed)
    shapes = ((case.rows, case.width), (len(case.sizes), case.width, case.wider), (case.rows, case.wider))
    rows, weights, dy = (np.zeros(shape) if case.zeros else rng.standard_normal(shape) for shape in shapes)
    if case.behind is not None:
        for x in (rows, dy):
            x[sum(case.sizes):] = case.behind
    sizes = jnp.asarray(case.sizes, jnp.int32)
    return jnp.asarray(rows, dtype), jnp.asarray(weights, dtype), sizes, jnp.asarray(dy, dtype)


def exact(rows: AnyArray, weights: AnyArray, sizes: AnyArray, dy: AnyArray) -> tuple[np.ndarray, ...]:
    """Return the product and both gradients in float64, group by group."""
    rows, weights, dy = (np.asarray(x, np.float64) for x in (rows, weights, dy))
    y, drows, dweights = np.zeros_like(dy), np.zeros_like(rows), np.zeros_like(weights)
    ends = np.cumsum(sizes)
    for group, (begin, end) in enumerate(zip(ends - np.asarray(sizes), ends, strict=True)):
        mine = slice(begin, end)
        y[mine], drows[mine] = rows[mine] @ weights[group], dy[mine] @ weights[group].T
        dweights[group] = rows[mine].T @ dy[mine]
    return y, drows, dweights


@cache
def differentiated(backend: str) -> Callable[..., GROUPED]:
    """Return the product of a backend with its gradients, as a loss differentiates it."""
    def run(rows, weights, sizes, dy):
        y, back = jax.vjp(lambda a, b: grouped_matmul.grouped_matmul(a, b, sizes, backend=backend), rows, weights)
        return y, *back(dy)
    return jax.jit(run)


@cache
def by_hand(backend: str) -> Callable[..., GROUPED]:
    """Return the same by the function for backward passes that are written by hand."""
    def run(rows, weights, sizes, dy):
        return (grouped_matmul.grouped_matmul(rows, weights, sizes, backend=backend),
                *grouped_matmul.grouped_matmul_gradients(rows, weights, sizes, dy, backend=backend))
    return jax.jit(run)


def complaints(case: Case, run: Callable[..., GROUPED], dtype: DTypeLike, seed: int = 0) -> list[str]:
    """Return what a backend gets wrong of a case, a sentence each; none: it conforms."""
    given = arrays(case, dtype, seed)
    got, again = (jax.tree.map(np.asarray, run(*given)) for _ in range(2))
    found, tolerance = [], TOLERANCE[jnp.dtype(dtype).name]
    for name, mine, second, want in zip(("product", "gradient by rows", "gradient by weights"), got, again,
                                        exact(*given), strict=True):
        scale = max(1.0, float(np.abs(want).max(initial=0.0)))
        error = float(np.abs(mine.astype(np.float64) - want).max()) / scale
        if mine.dtype != jnp.dtype(dtype):
            found.append(f"the {name} is {mine.dtype}, not {jnp.dtype(dtype).name}")
        if not error <= tolerance:  # nor where it is not a number
            found.append(f"the {name} is wrong by {error:.2g} of its largest element")
        if mine.tobytes() != second.tobytes():
            found.append(f"the {name} has other bits the second time")
    return found


def backends(case: Case, dtype: DTypeLike) -> list[str]:
    """Return which backends take a case on this machine's device."""
    return [one for one in ("xla", *grouped_matmul.KERNELS) if not grouped_matmul.refusal(
        one, jnp.dtype(dtype), case.rows, (case.width, case.wider))]


def judged(backend: str, dtype: DTypeLike, cases: dict[str, Case]) -> Iterator[tuple[str, list[str]]]:
    """Yield each case's name, and what is wrong."""
    for name, case in cases.items():
        for way, run in (("", differentiated(backend)), (", gradients alone", by_hand(backend))):
            try:
                yield name + way, complaints(case, run, dtype)
            except Exception as error:  # a kernel that does not compile is one that does not conform
                yield name + way, [f"{type(error).__name__}: {error}"[:300]]
