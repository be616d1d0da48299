"""The largest attention logit of each head, which layers report where a step measures it (extensions/qk_clip.py).

Shape suffixes: B batch, T and S sequence, H query heads, G key/value heads, K head width, P parts of a sequence.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

from jaxtrain.base.annotations import PyTree
from jaxtrain.base.further_sums import LARGEST
from jaxtrain.sharding import activations

_FOUND: ContextVar[list[jax.Array] | None] = ContextVar("found", default=None)


@contextlib.contextmanager
def collected(begin: bool = False) -> Iterator[list[jax.Array]]:
    """A context in which a list gets the largest logits of the attention that is traced, [B, P, H].

    It stays empty where no context around it has begun to measure, by `begin`.
    """
    found = list[jax.Array]()
    token = _FOUND.set(found if begin or _FOUND.get() is not None else None)
    try:
        yield found
    finally:
        _FOUND.reset(token)


def reported(aux: dict, found: list[jax.Array]) -> dict:
    """Return the auxiliary values of a layer with the largest logits of its attention, if they were measured."""
    return aux | {LARGEST: found[0]} if found else aux


def tell(found: list[jax.Array]) -> None:
    """Report what a branch has collected."""
    if (mine := _FOUND.get()) is not None:
        mine += found


def measure(q_BTHK: jax.Array, k_BSGK: jax.Array, segments_BT: jax.Array | None, window: int) -> None:
    """Report the largest logits of causal attention, before a soft cap, if they are measured here."""
    if _FOUND.get() is not None:
        from jaxtrain.parallel.largest_logits import largest_logits

        tell([largest_logits(*jax.lax.stop_gradient((q_BTHK, k_BSGK)), segments_BT, window)])


def over_rows(largest: PyTree) -> PyTree:
    """Return the largest of all rows in the array and of all parts of them, from [layers, B, P, H] to [layers, H]."""
    return jax.tree.map(lambda x: activations.constrain(x.max((1, 2)), None, None), largest)
