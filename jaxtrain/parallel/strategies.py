"""The strategy of context parallelism that attention has, the backend that computes it, and why."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.kernels.attention import choose_backend
from jaxtrain.sharding import mesh_context


class Strategy(NamedTuple):
    """A strategy, and the reason why `auto` means it; "" if it was asked for."""

    name: str
    reason: str = ""


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
           heads: int, soft_cap: float, packed: bool, sinks: bool) -> tuple[Strategy, str]:
    """Return the strategy and the backend that these keys mean for rows in so many parts."""
    def by(name):
        """Return what computes a strategy: `ulysses` has whole rows, the others a part at a time."""
        length = seq_len if name == "ulysses" else seq_len // parts
        return choose_backend(backend, mesh_context.platform(), dtype, length, head_dim, name, soft_cap, packed, sinks)

    chosen = choose(strategy, stages, parts, heads, by)
    return chosen, by(chosen.name)
