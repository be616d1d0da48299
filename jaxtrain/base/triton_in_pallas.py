"""Whether this JAX can compile Pallas kernels by Triton."""

import importlib.util
from functools import cache


@cache
def has_triton() -> bool:
    """Return whether this JAX still has what it has announced to remove."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None
