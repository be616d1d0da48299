"""Routes that a batch brings, in place of the router's own choice: those that a sampler took (`rl.replay_routes`).

A sampler and a trainer differ by rounding, so that a token may go to other experts in one than in the other, which
changes its probability by far more than rounding does. With the sampler's routes the trainer computes the network that
the sampler ran (routing replay: arXiv 2507.18071 and 2510.11370). Which experts is given; how much each weighs is the
router's, with its gradient.

Shape suffixes: B batch, T sequence, L layers of the model, K experts of a token.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.models import layer_place

ROUTES = "routes"  # of a batch [B, T, L, K]: experts; below 0: the router's own
_ROUTES: ContextVar[jax.Array | None] = ContextVar("routes", default=None)


@contextlib.contextmanager
def of(batch: Mapping[str, jax.Array]) -> Iterator[None]:
    """A context in which layers with experts take the routes of this batch."""
    token = _ROUTES.set(batch[ROUTES])
    try:
        with layer_place.read():
            yield
    finally:
        _ROUTES.reset(token)


def of_layer() -> jax.Array | None:
    """Return the routes of the layer that is computed now [B, T, K]; None: the router chooses."""
    routes_BTLK = _ROUTES.get()
    if routes_BTLK is None:
        return None
    return lax.dynamic_index_in_dim(routes_BTLK, layer_place.number_of_all(), 2, keepdims=False)


def in_place_of(given_BTK: jax.Array, chosen_BTK: jax.Array) -> jax.Array:
    """Return the experts that are given for each token, and the router's where none are."""
    return jnp.where(given_BTK >= 0, given_BTK, chosen_BTK)
