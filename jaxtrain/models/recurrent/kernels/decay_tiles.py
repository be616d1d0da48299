"""The tokens of a chunk and their decays, in kernels that hold tiles (chunk_tiles.py).

Shape suffixes: C tokens of a chunk, X channels of a tile. `since` is the decay of the state before the chunk until
after a token (0 in later documents), `end` the decay of what a token writes until the end of the chunk (0 in earlier
ones).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.base.annotations import AnyArray
from jaxtrain.kernels.chunks.chunk_matrices import F32, column, product, tokens

Ref = AnyArray  # two dimensions of memory


class Chunk(NamedTuple):
    """The tokens of a chunk, without their keys and values."""

    g: Ref
    beta_C1: jax.Array
    first_C1: jax.Array  # 1 for tokens of the first document, else 0
    last_C1: jax.Array  # 1 for tokens of the last one
    within_CC: jax.Array  # whether two tokens are of one document

    @property
    def of_heads(self) -> bool:
        """Whether all channels of a head decay as one."""
        return len(self.g) == 1


def chunk_of(g: AnyArray, beta: AnyArray, documents: Ref) -> Chunk:
    """Return a chunk, of references or of rows that were read from them."""
    of_1C = documents[...]
    of_C1 = column(of_1C)
    first, last = (jnp.where(of_C1 == which, 1.0, 0.0) for which in (0, of_1C.max()))
    return Chunk(g, column(beta[...]), first, last, of_C1 == of_1C)


def row_sums(x_CX: jax.Array) -> jax.Array:
    """Return the sum of each token's channels."""
    return x_CX.sum(1, keepdims=True)


def not_after(size: int) -> jax.Array:
    """Return which tokens are not after each token."""
    i, j = tokens(size)
    return j <= i


def factors(chunk: Chunk, at: AnyArray) -> tuple[jax.Array, ...]:
    """Return `since` and `end` of a tile of key channels, [C, 1] or [C, X]."""
    since = not_after(len(chunk.beta_C1))
    if chunk.of_heads:
        sums = (row_sums(jnp.where(which, chunk.g[...], 0)) for which in (since, ~since))
    else:
        sums = (product(which.astype(F32), chunk.g[:, at], exact=True) for which in (since, ~since))
    return tuple(jnp.exp(x) * inside for x, inside in zip(sums, (chunk.first_C1, chunk.last_C1), strict=True))


def between(chunk: Chunk) -> jax.Array:
    """Return the decays of heads from each token until after a later one; for earlier ones it is 1."""
    i, j = tokens(len(chunk.beta_C1))
    return jnp.exp(lax.cumsum(jnp.where(i > j, column(chunk.g[...]), 0.0), 0))


def of_decays(chunk: Chunk, d_CC: jax.Array, pairs_CC: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradient of the products that decay between tokens, and that of the decays of heads between tokens.

    d_CC is the gradient of its result, 0 for pairs without use.
    """
    C = len(d_CC)
    if not chunk.of_heads:
        return d_CC, jnp.zeros((1, C), F32)
    dlogs_CC = d_CC * pairs_CC
    earlier = lax.cumsum(dlogs_CC, 1) - dlogs_CC
    return d_CC * between(chunk), jnp.where(not_after(C), earlier, 0).sum(0, keepdims=True)
