"""Kernels that are traced and lowered once for each shape, however many layers call them.

JAX keeps what it lowered by the traced kernel. Layers of one loop share that, unrolled or not; others, such as those of
a repeated pattern, would each trace and lower the same kernel again.
"""

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import jax

Result = TypeVar("Result")


def traced_once(kernel: Callable[..., Result], *arrays: jax.Array, interpret: object, **told: object) -> Result:
    """Return what a kernel makes of arrays; what it is told are values that can be hashed."""
    if interpret:
        return kernel(*arrays, interpret=interpret, **told)
    return _jitted(kernel, tuple(told))(*arrays, **told)


@cache
def _jitted(kernel: Callable[..., Result], static: tuple[str, ...]) -> Callable[..., Result]:
    return jax.jit(kernel, static_argnames=static)
