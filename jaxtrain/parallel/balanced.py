"""Rows in their own order and in balanced order, in which each of n devices has an early and a late chunk of them."""

import jax
import jax.numpy as jnp
import numpy as np


def balance(x: jax.Array, n: int) -> jax.Array:
    """Return rows [B, T, ...] in the order in which n devices hold their tokens."""
    return _chunks(x, _held(n))


def unbalance(x: jax.Array, n: int) -> jax.Array:
    """Return such rows in their own order."""
    return _chunks(x, np.argsort(_held(n)))


def _held(n: int) -> np.ndarray:
    """Return the chunks of a sequence in the order in which n devices hold them."""
    return np.stack([np.arange(n), 2 * n - 1 - np.arange(n)], 1).ravel()


def _chunks(x: jax.Array, order: np.ndarray) -> jax.Array:
    """Put the chunks of rows [B, T, ...] into this order."""
    each = jnp.split(x, len(order), axis=1)
    return jnp.concatenate([each[i] for i in order], axis=1)
