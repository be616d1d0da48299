"""Sums and counts along rows whose tokens are spread over devices. Called inside an island."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.parallel.context import balanced_order


@dataclass(frozen=True)
class Row:
    """The mesh axes over which a row's tokens are spread."""

    axes: tuple[str, ...]

    def length(self, here: int) -> int:
        """Of the whole row, of which each device has `here` tokens."""
        return here * (lax.axis_size(self.axes) if self.axes else 1)

    def add(self, x: jax.Array) -> jax.Array:
        """Over the devices that share a row."""
        return lax.psum(x, self.axes) if self.axes else x

    def before(self, hits_BTE: jax.Array) -> jax.Array:
        """For each token, how many earlier ones of its row hit."""
        if not self.axes:
            return jnp.cumsum(hits_BTE, 1) - hits_BTE
        order_T = self.token_order(hits_BTE.shape[1])
        all_BTE, all_T = (lax.all_gather(a, self.axes, axis=a.ndim > 1, tiled=True) for a in (hits_BTE, order_T))
        natural_BTE = jnp.zeros_like(all_BTE).at[:, all_T].set(all_BTE, unique_indices=True)
        return (jnp.cumsum(natural_BTE, 1) - natural_BTE)[:, order_T]

    def token_order(self, here: int) -> jax.Array:
        """Where in the row this device's tokens stand."""
        return balanced_order(lax.axis_index(self.axes), lax.axis_size(self.axes), here)
