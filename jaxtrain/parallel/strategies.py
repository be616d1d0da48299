"""Which strategy of context parallelism attention has, which backend computes it, and why."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.kernels.attention import choose_backend
from jaxtrain.sharding import mesh_context


class Strategy(NamedTuple):
    """A strategy, and the reason why `auto` means it; "" if it was asked for."""

    name: str
    reason: str = ""


def backend_of(strategy: str, asked: str, dtype: jnp.dtype, seq_len: int, head_dim: int, parts: int,
               **more: Any) -> str:
    """Return what computes attention of rows in so many parts: `ulysses` has whole rows, the others a part at a time.

    `more`: as `choose_backend` takes it.
    """
    length = seq_len if strategy == "ulysses" else seq_len // parts
    return choose_backend(asked, mesh_context.platform(), dtype, length, head_dim, strategy, **more)


def choose(asked: str, stages: int, parts: int, heads: int, backend: Callable[[str], str]) -> Strategy:
    """Return the strategy that `mesh.context_strategy` means here.

    jaxtrain/run/validation.py refuses what cannot work.

    Args:
        asked: the key's value.
        stages: of a pipeline.
        parts: of a sequence, each on a device.
        heads: of queries on a device; fewer ones of keys and values are repeated as far as need be.
        backend: returns what computes attention by a strategy; raises UserError if nothing can.
    """
    if asked != "auto":
        return Strategy(asked)
    # Pipeline stages attend at different times, and a permutation waits for the whole mesh; a gather does not.
    other = "gather" if stages > 1 else "ring"
    if heads % parts:
        return Strategy(other, f"mesh.context={parts} does not divide the {heads} query heads of a device")
    if _kernel(backend, other) and not _kernel(backend, "ulysses"):
        return Strategy(other, f"{_kernel(backend, other)} does not take whole rows")
    return Strategy("ulysses", f"mesh.context={parts} divides the {heads} query heads of a device")


def _kernel(backend: Callable[[str], str], strategy: str) -> str:
    """Return the kernel that computes attention by a strategy; "" if there is none."""
    try:
        return backend(strategy).removeprefix("xla")
    except UserError:
        return ""


def decide(strategy: str, backend: str, dtype: jnp.dtype, seq_len: int, head_dim: int, *, stages: int, parts: int,
           heads: int, **more: Any) -> tuple[Strategy, str]:
    """Return the strategy and the backend that these keys mean for rows in so many parts."""
    of = partial(backend_of, asked=backend, dtype=dtype, seq_len=seq_len, head_dim=head_dim, parts=parts, **more)
    chosen = choose(strategy, stages, parts, heads, of)
    return chosen, of(chosen.name)
