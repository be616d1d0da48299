"""The routes of tokens, which layers with experts keep in the cache of generation beside keys and values.

They are entries like others, [B, 1, T, K], so that they move with their rows; no layer reads them.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace

import jax

from jaxtrain.base.annotations import PyTree
from jaxtrain.models.attention.kv_cache import CACHE, Aux, Cache

ROUTES = "routes"  # the name of these entries
_KEPT: ContextVar[bool] = ContextVar("kept", default=False)


@contextlib.contextmanager
def kept(there: bool) -> Iterator[None]:
    """A context in which layers with experts keep their routes, or do not."""
    token = _KEPT.set(there)
    try:
        yield
    finally:
        _KEPT.reset(token)


def are_kept() -> bool:
    """Return whether layers that are traced now tell their routes, [B, T, K], among their auxiliary values."""
    return _KEPT.get()


def with_cache(layer: Callable[..., tuple[jax.Array, Aux]], cache: Cache, *given: PyTree) -> tuple[jax.Array, Aux]:
    """Apply a layer with its cache, and keep there the routes that it tells."""
    entries = cache.entries
    if isinstance(entries, dict) and ROUTES in entries:
        rest = replace(cache, entries={name: entry for name, entry in entries.items() if name != ROUTES})
    else:
        rest = cache
    x, aux = layer(*given, cache=rest)
    if ROUTES not in aux:
        return x, aux
    own = {ROUTES: aux[ROUTES][:, None]}
    if cache.in_place and entries is not None:
        own = replace(cache, entries={ROUTES: entries[ROUTES]}).extended(own)
    others = {name: value for name, value in aux.items() if name != ROUTES}
    return x, others | {CACHE: aux.get(CACHE, {}) | own}
