"""The kernels of Mosaic and Triton on the device they are made for, against plain operations in float32 and float64.

    python -m tools.device.accelerator_kernels

The cases are those of the tests, which run them by an interpreter in float32; here they are compiled, in bfloat16. Each
is computed twice: other bits the second time are a race.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.kernels import attention, grouped_conformance
from tests.kernels import test_grouped_matmul as grouped
from tests.kernels.attention import test_mosaic_attention as tiles

LARGE = {  # with many blocks of threads at once
    "four heads a key": tiles.Case([[1000, 1500, 1596], [4096]], T=4096, H=8, G=2, K=128, V=128),
    "window": tiles.Case([[3000, 1096]], T=4096, H=8, G=8, window=1024),
}
TOLERANCE = 2**-6  # of the largest element: inputs and results are rounded to bfloat16, and weights between products


def judged(few: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each case's name and its errors, or why it failed."""
    kernel = "mosaic" if jax.default_backend() == "gpu" else "xla"
    cases = {"one document of several tiles": tiles.CASES["one document of several tiles"]} if few else {
        **tiles.CASES, **LARGE}
    for name, case in cases.items():
        yield f"attention: {name}", tried(functools.partial(of_attention, case, kernel))
        if kernel != "xla":
            yield f"attention by triton: {name}", tried(functools.partial(of_attention, case, "triton"))
    for width, wider, rows, groups in ((128, 192, 256, 5),) if few else ((128, 192, 256, 5), (2048, 768, 16384, 64)):
        for seed in range(1 if few else 4 if groups < 10 else 2):
            yield (f"grouped matmul: {rows} x {width} x {wider}, {groups} groups, seed {seed}",
                   tried(functools.partial(of_groups, width, wider, rows, groups, seed, kernel)))
    yield from conforming(few)


def conforming(few: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each backend of grouped matmuls and case of the conformance suite, and what is wrong."""
    dtype = jnp.bfloat16 if jax.default_backend() != "cpu" else jnp.float32
    cases = dict([*grouped_conformance.CASES.items()][:1]) if few else grouped_conformance.CASES
    for backend in sorted({one for case in cases.values() for one in grouped_conformance.backends(case, dtype)}):
        able = {name: case for name, case in cases.items() if backend in grouped_conformance.backends(case, dtype)}
        for name, wrong in grouped_conformance.judged(backend, dtype, able):
            yield f"conformance of {backend}: {name}", {"right": not wrong, **({"wrong": wrong} if wrong else {})}


def tried(case: Any) -> dict[str, Any]:
    try:
        return case()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def of_attention(case: tiles.Case, kernel: str) -> dict[str, Any]:
    """Errors of the output and of the gradients."""
    given = tiles.arrays(case, jnp.bfloat16)

    def ours(q, k, v):
        return attention.attend(q, k, v, segments_BT=jnp.asarray(case.segments), window=case.window,
                                soft_cap=case.soft_cap, backend=kernel)

    got, again = (tiles.gradients(ours, *given) for _ in range(2))
    want = tiles.gradients(functools.partial(tiles.plain, case), *(x.astype(jnp.float32) for x in given))
    return compared(("output", "dq", "dk", "dv"), got, again, want)


def of_groups(width: int, wider: int, rows: int, groups: int, seed: int, kernel: str) -> dict[str, Any]:
    """Errors of grouped matmuls and of their gradients, with groups of any size, some of them empty."""
    rng = np.random.default_rng(seed)
    bounds = np.sort(rng.choice([0, 1, 63, 64, 65, 127, 128, 129, *rng.integers(0, rows + 1, 2 * groups)], groups))
    sizes = np.diff(bounds, prepend=0)
    given = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
             for shape in ((rows, width), (groups, width, wider), (rows, wider))]
    got, again = (grouped.run(*given, jnp.asarray(sizes), kernel) for _ in range(2))
    want = grouped.plain(*(np.asarray(x, np.float32) for x in given), sizes)
    return compared(("product", "drows", "dweights"), got, again, want)


def compared(names: tuple[str, ...], got: Any, again: Any, want: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, mine, second, exact in zip(names, got, again, want, strict=True):
        mine, exact = np.asarray(mine, np.float32), np.asarray(exact, np.float32)
        found[name] = float(np.abs(mine - exact).max() / max(np.abs(exact).max(), 1))
        found["same_bits"] = bool((mine == np.asarray(second, np.float32)).all()) and found.get("same_bits", True)
    return {**found, "right": found["same_bits"] and all(found[name] < TOLERANCE for name in names)}


if __name__ == "__main__":
    for what, errors in judged():
        print(what, errors)
