"""Sums and counts along rows whose tokens are sharded over devices; called inside a manual region."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.parallel.cut_rows import balanced_order


@dataclass(frozen=True)
class Row:
    """The mesh axes over which a row's tokens are sharded."""

    axes: tuple[str, ...]

    def length(self, here: int) -> int:
        """Return the length of the whole row, of which each device has `here` tokens."""
        return here * (lax.axis_size(self.axes) if self.axes else 1)

    def add(self, x: jax.Array) -> jax.Array:
        """Sum over the devices that share a row."""
        return lax.psum(x, self.axes) if self.axes else x

    def before(self, hits_BTE: jax.Array) -> jax.Array:
        """Return, for each token, the number of hits among earlier tokens of its row."""
        if not self.axes:
            return jnp.cumsum(hits_BTE, 1) - hits_BTE
        order_T = self.token_order(hits_BTE.shape[1])
        all_BTE, all_T = (lax.all_gather(a, self.axes, axis=a.ndim > 1, tiled=True) for a in (hits_BTE, order_T))
        natural_BTE = jnp.zeros_like(all_BTE).at[:, all_T].set(all_BTE, unique_indices=True)
        return (jnp.cumsum(natural_BTE, 1) - natural_BTE)[:, order_T]

    def token_order(self, here: int) -> jax.Array:
        """Return the positions of this device's tokens in the row."""
        return balanced_order(lax.axis_index(self.axes), lax.axis_size(self.axes), here)
