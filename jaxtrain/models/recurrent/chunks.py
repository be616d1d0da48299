"""Rows cut into chunks of tokens, which tokens of a chunk are in one document, and decays between them.

Decays of several tokens are sums of logarithms over just these tokens, never differences of longer sums: those lose
digits where one decay is strong, and their exponentials may be infinite.

Shape suffixes: N chunks, B batch, T sequence, H heads, C tokens of a chunk, X channels that decay on their own, or 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

F32 = jnp.float32
SIZE = 64  # tokens of a chunk; fewer where rows are shorter


def cut(x: jax.Array, value: float | bool = 0) -> jax.Array:
    """Cut [B, T, H, ...] into [N, B, H, C, ...], after padding T with `value`."""
    tokens = x.shape[1]
    size = min(SIZE, 1 << (tokens - 1).bit_length())
    x = jnp.pad(x, [(0, 0), (0, -tokens % size), *[(0, 0)] * (x.ndim - 2)], constant_values=value)
    x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
    return x.transpose(1, 0, 3, 2, *range(4, x.ndim))


def join(x_NBHC: jax.Array, tokens: int) -> jax.Array:
    """Undo `cut`: [B, T, H, ...]."""
    x = x_NBHC.transpose(1, 0, 3, 2, *range(4, x_NBHC.ndim))
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :tokens]


class Documents(NamedTuple):
    """Masks of 0.0 and 1.0 for what passes between the tokens of a chunk and its states; H is 1, for all heads."""

    pairs: jax.Array  # [N, B, H, C, C]: a token and an earlier one, or itself, of its document
    from_before: jax.Array  # [N, B, H, C, 1]: the state before the chunk is of the token's document
    to_end: jax.Array  # [N, B, H, C, 1]: the state after the chunk is
    through: jax.Array  # [N, B, H, 1]: both states are of one document
    inside: jax.Array  # [N, B, H, C, 1]: the token does not begin a document, so that its decay counts


def numbers(starts_BT: jax.Array) -> jax.Array:
    """Return which document of its chunk each token is of, [N, B, 1, 1, C]; 0: that of the state before it."""
    return jnp.cumsum(cut(starts_BT[:, :, None]), -1)[..., None, :]


def documents(starts_BT: jax.Array) -> Documents:
    """Return the documents of chunks, given the tokens that begin one."""
    starts = cut(starts_BT[:, :, None])
    at = jnp.cumsum(starts, -1)
    last = at[..., -1:]
    pairs = jnp.tril(at[..., :, None] == at[..., None, :])
    return Documents(*(x.astype(F32) for x in (
        pairs, (at == 0)[..., None], (at == last)[..., None], last == 0, ~starts[..., None])))


def since_start(g: jax.Array) -> jax.Array:
    """Return the decay of the state before a chunk until after each token, from logarithms [..., C, X]."""
    return jnp.exp(jnp.cumsum(g, -2))


def until_end(g: jax.Array) -> jax.Array:
    """Return the decay of what each token adds until the end of its chunk, from logarithms [..., C, X]."""
    following = jnp.concatenate([g[..., 1:, :], jnp.zeros_like(g[..., :1, :])], -2)
    return jnp.exp(lax.cumsum(following, following.ndim - 2, reverse=True))


def whole(g: jax.Array) -> jax.Array:
    """Return the decay over all of each chunk, [..., X]."""
    return jnp.exp(g.sum(-2))


def between(g: jax.Array) -> jax.Array:
    """Return the decays from each token (last dimension) until after a later one, from logarithms [..., C, 1].

    For earlier ones it is 1.
    """
    size = g.shape[-2]
    return jnp.exp(jnp.cumsum(jnp.where(jnp.tri(size, k=-1, dtype=bool), g, 0), -2))


def products_by_halves(x: jax.Array, y: jax.Array, g: jax.Array) -> jax.Array:
    """Return [..., C, C], the product of each token's x with each earlier one's y, every channel decayed in between.

    Both decay towards a token between them: x since the middle of a stretch of the chunk, y until it. No factor is
    above 1, and if one is 0 in float32 so is the product. Stretches of 2, 4, ... C tokens give all pairs.
    """
    shape = (*x.shape[:-1], x.shape[-2])
    # In few dimensions: with 7 of them JAX 0.10 crashes as it compiles the gradient for a CPU.
    x, y, g = (x.reshape(-1, *x.shape[-2:]) for x in (x, y, g))
    products, size = jnp.zeros((*x.shape[:-1], 1, 1)), 1

    def halves(x):
        x = x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1])
        return x[..., 0, :, :], x[..., 1, :, :]

    while size < x.shape[-2]:
        early, late = halves(g)
        new = jnp.einsum("...ik,...jk->...ij", halves(x)[1] * since_start(late), halves(y)[0] * until_end(early))
        first, second = (products.reshape(*new.shape[:-2], 2, size, size)[..., half, :, :] for half in (0, 1))
        products = jnp.block([[first, jnp.zeros_like(new)], [new, second]])
        size *= 2
    return products.reshape(shape)
