"""Tiled attention in plain operations, with one tile's scores at a time: partial results that can be merged.

A partial result is a normalized output and the logarithm of its normalizer (`lse`); two of them over different keys
merge into one. The gradient recomputes scores from `lse`. A tile in which no query may attend to any key costs nothing.

Shape suffixes: B batch, T and S queries and keys, H query heads, G key/value heads, R query heads per group (H = G R),
K head width. Sums are float32 for all input dtypes.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.base.annotations import PyTree
from jaxtrain.kernels.functions import soft_capped

F32 = jnp.float32
SCORES = 2**24  # the most on a device at a time, over its examples and heads
NOTHING = -1e30  # the lse of no keys: finite, so that differences are defined; merged, it has exactly zero weight


class Tokens(NamedTuple):
    """The positions of tokens in their sequence, [T], and the segments they belong to, [B, T]."""

    at: jax.Array
    segments: jax.Array | None

    def part(self, part: slice) -> "Tokens":
        """Return a slice of them."""
        return Tokens(self.at[part], None if self.segments is None else self.segments[:, part])


class Scoring(NamedTuple):
    """The window and the soft cap of scores, and what computes them."""

    window: int = 0  # how many tokens a query looks back on; 0: all
    soft_cap: float = 0.0  # 0: none
    kernel: str = "xla"  # of the backends of attention


class Pull(NamedTuple):
    """The results of queries over all of their keys, as the backward pass needs them."""

    pull: jax.Array  # the gradient by the output, [B, T, H, K]
    out: jax.Array
    lse: jax.Array  # [B, T, H]
    delta: jax.Array | None  # for each row, the sum of the products of the output and its gradient


def forward(q_BTHK, k_BSGK, v_BSGK, queries: Tokens, keys: Tokens, scoring: Scoring,
            own: bool = False) -> tuple[jax.Array, jax.Array]:
    """Return out [B, T, H, K] and lse [B, T, H], both float32.

    own: keys are those of the queries' tokens, in the order of their positions.
    """
    G, R, side = k_BSGK.shape[2], q_BTHK.shape[2] // k_BSGK.shape[2], _side(q_BTHK)
    queries, keys, unseen = _in_this_layer(q_BTHK, queries, keys)
    of_queries = _cut(q_BTHK, (G, R), side), cut_tokens(queries, side)
    of_keys = _cut(k_BSGK, (G,), side), _cut(v_BSGK, (G,), side), cut_tokens(keys, side)

    def add(results, pair):
        (q, queries), (k, v, keys) = at(of_queries, pair[0]), at(of_keys, pair[1])
        result = at(results, pair[0])

        def more():
            scores = _scores(q, k, queries, keys, scoring, unseen)
            top = scores.max(-1)
            weights = jnp.exp(scores - top[..., None])
            total = weights.sum(-1)
            out = _dot("bgrts,bgsk->bgrtk", weights.astype(v.dtype), v) / total[..., None]
            return merge(result, (out, top + jnp.log(total)))

        result = lax.cond(meet(queries, keys, scoring.window), more, lambda: result)
        return put(results, pair[0], result), None

    shape = of_queries[0].shape
    nothing = jnp.zeros((*shape[:-1], v_BSGK.shape[-1]), F32), jnp.full(shape[:-1], NOTHING)
    (out, lse), _ = lax.scan(add, nothing, pairs(queries, keys, side, scoring.window, own))
    return _join(out, 2), _join(lse, 2)


def merge(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Merge two partial results over different keys into one over all of them."""
    lse = jnp.logaddexp(a[1], b[1])
    weight_a, weight_b = (jnp.exp(part - lse)[..., None] for part in (a[1], b[1]))
    return weight_a * a[0] + weight_b * b[0], lse


def backward(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, pull: Pull, queries: Tokens, keys: Tokens,
             scoring: Scoring, own: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the contributions to dq, dk and dv in float32."""
    G, R, side = k_BSGK.shape[2], q_BTHK.shape[2] // k_BSGK.shape[2], _side(q_BTHK)
    queries, keys, unseen = _in_this_layer(q_BTHK, queries, keys)
    of_keys = _cut(k_BSGK, (G,), side), _cut(v_BSGK, (G,), side), cut_tokens(keys, side)
    assert pull.delta is not None
    of_queries = *(_cut(x, (G, R), side) for x in (q_BTHK, pull.pull, pull.lse, pull.delta)), cut_tokens(queries, side)

    def add(gradients, pair):
        (q, dout, lse, delta, queries), (k, v, keys) = at(of_queries, pair[0]), at(of_keys, pair[1])
        dqs, dkvs = gradients
        dq, (dk, dv) = at(dqs, pair[0]), at(dkvs, pair[1])

        def more():
            scores = _scores(q, k, queries, keys, scoring, unseen)
            weights = jnp.exp(scores - lse[..., None])
            pull = _dot("bgrtk,bgsk->bgrts", dout, v) - delta[..., None]
            dscores = weights * pull * q.shape[-1] ** -0.5
            if cap := scoring.soft_cap:  # keys that are not seen have no weight
                dscores *= 1 - jnp.square(jnp.maximum(scores, -cap) / cap)
            dscores = dscores.astype(q.dtype)
            return (dq + _dot("bgrts,bgsk->bgrtk", dscores, k),
                    (dk + _dot("bgrts,bgrtk->bgsk", dscores, q),
                     dv + _dot("bgrts,bgrtk->bgsk", weights.astype(dout.dtype), dout)))

        dq, dkv = lax.cond(meet(queries, keys, scoring.window), more, lambda: (dq, (dk, dv)))
        return (put(dqs, pair[0], dq), put(dkvs, pair[1], dkv)), None

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, F32), (of_queries[0], of_keys[:2]))
    (dq, (dk, dv)), _ = lax.scan(add, nothing, pairs(queries, keys, side, scoring.window, own))
    return _join(dq, 2), _join(dk, 1), _join(dv, 1)


def largest(q_BTHK: jax.Array, k_BSGK: jax.Array, queries: Tokens, keys: Tokens, scoring: Scoring,
            own: bool = False) -> jax.Array:
    """Return the largest score of each row and head, [B, H]; padding, in segment 0, has none. `own`: as in `forward`.
    """
    G, R, side = k_BSGK.shape[2], q_BTHK.shape[2] // k_BSGK.shape[2], _side(q_BTHK)
    queries, keys, unseen = _in_this_layer(q_BTHK, queries, keys)
    of_queries = _cut(q_BTHK, (G, R), side), cut_tokens(queries, side)
    of_keys = _cut(k_BSGK, (G,), side), cut_tokens(keys, side)

    def add(top, pair):
        (q, queries), (k, keys) = at(of_queries, pair[0]), at(of_keys, pair[1])

        def more():
            scores = _scores(q, k, queries, keys, scoring, unseen)
            if queries.segments is not None:
                scores = jnp.where((queries.segments > 0)[:, None, None, :, None], scores, unseen)
            return jnp.maximum(top, scores.max((-2, -1)))

        return lax.cond(meet(queries, keys, scoring.window), more, lambda: top), None

    nothing = jnp.full((len(q_BTHK), G, R), NOTHING, F32)
    return lax.scan(add, nothing, pairs(queries, keys, side, scoring.window, own))[0].reshape(len(q_BTHK), G * R)


def pairs(queries: Tokens, keys: Tokens, side: int, window: int, own: bool) -> np.ndarray:
    """Return the tiles of queries and of keys that may meet, as far as it is known before any number is, [pairs, 2]."""
    rows, columns = (count(len(tokens.at), side) for tokens in (queries, keys))
    row, column = np.indices((rows, columns)).reshape(2, -1)
    if own:  # positions are at least as far apart as their places in this order
        apart = (row - column) * (len(queries.at) // rows)  # of the first query and the first key
        near = apart < (window or len(queries.at)) + len(keys.at) // columns - 1
        row, column = (x[(row >= column) & near] for x in (row, column))
    return np.stack([row, column], 1).astype(np.int32)


def at(tree: PyTree, number: jax.Array) -> PyTree:
    """Return the tile of this number."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), tree)


def put(tree: PyTree, number: jax.Array, new: PyTree) -> PyTree:
    """Return the tiles with a new one in place of that of this number."""
    return jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, number, 0), tree, new)


def _in_this_layer(q_BTHK: jax.Array, queries: Tokens, keys: Tokens) -> tuple[Tokens, Tokens, jax.Array]:
    """Return the tokens, and the score of a key that is not seen, as if they depended on the queries.

    What no layer changes JAX computes once, before a loop over layers: here the masks of all tiles at a time, in arrays
    as large as all scores.
    """
    unseen = jnp.full((), NOTHING, F32)
    return lax.optimization_barrier((q_BTHK[:1, :1, :1, :1], queries, keys, unseen))[1:]


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=F32)


def _scores(q_BGRTK, k_BGSK, queries: Tokens, keys: Tokens, scoring: Scoring, unseen: jax.Array) -> jax.Array:
    seen_BTS = seen(queries, keys, scoring.window)[:, None, None]
    scores = _dot("bgrtk,bgsk->bgrts", q_BGRTK, k_BGSK) * q_BGRTK.shape[-1] ** -0.5
    return jnp.where(seen_BTS, soft_capped(scores, scoring.soft_cap), unseen)


def seen(queries: Tokens, keys: Tokens, window: int) -> jax.Array:
    """Return which keys each query may attend to, [B or 1, T, S]."""
    behind_TS = queries.at[:, None] - keys.at[None, :]
    seen_TS = behind_TS >= 0
    if window:
        seen_TS &= behind_TS < window
    if queries.segments is None or keys.segments is None:
        return seen_TS[None]
    return seen_TS & (queries.segments[:, :, None] == keys.segments[:, None, :])


def all_seen(queries: Tokens, keys: Tokens, window: int) -> jax.Array:
    """Return whether every query may attend to every key."""
    every = queries.at.min() >= keys.at.max()
    if window:
        every &= queries.at.max() - keys.at.min() < window
    if queries.segments is not None and keys.segments is not None:
        own = queries.segments[:, :1]
        every &= (queries.segments == own).all() & (keys.segments == own).all()
    return every


def meet(queries: Tokens, keys: Tokens, window: int) -> jax.Array:
    """Return whether any query may attend to any key, by the ends of both ranges; may err only towards yes."""
    meet = queries.at.max() >= keys.at.min()
    if window:
        meet &= queries.at.min() - keys.at.max() < window
    if queries.segments is not None and keys.segments is not None:
        a, b = queries.segments, keys.segments
        meet &= ((a.max(1) >= b.min(1)) & (b.max(1) >= a.min(1))).any()
    return meet


def _side(q_BTHK: jax.Array) -> int:
    """Return the number of tokens along each side of a tile."""
    return max(1, math.isqrt(SCORES // (q_BTHK.shape[0] * q_BTHK.shape[2])))


def count(tokens: int, side: int) -> int:
    """Return the fewest equal tiles of at most `side` tokens, or fewer, larger ones if the length has few divisors."""
    wanted = -(-tokens // side)
    above = next(n for n in range(wanted, tokens + 1) if tokens % n == 0)
    return above if above <= 4 * wanted else next(n for n in range(wanted, 0, -1) if tokens % n == 0)


def _cut(x: jax.Array, heads: tuple[int, ...], side: int) -> jax.Array:
    """Cut [B, T, H, ...] into [tiles, B, *heads, T / tiles, ...]: heads before sequence, as matmuls need them."""
    (B, T), tiles = x.shape[:2], count(x.shape[1], side)
    x = x.reshape(B, tiles, T // tiles, *heads, *x.shape[3:])
    return jnp.moveaxis(x, (1, 2), (0, 2 + len(heads)))


def cut_tokens(tokens: Tokens, side: int) -> Tokens:
    """Return tokens in tiles, [tiles, T / tiles] and [tiles, B, T / tiles]."""
    tiles, segments = count(len(tokens.at), side), tokens.segments
    if segments is not None:
        segments = jnp.moveaxis(segments.reshape(len(segments), tiles, -1), 1, 0)
    return Tokens(tokens.at.reshape(tiles, -1), segments)


def _join(x: jax.Array, heads: int) -> jax.Array:
    """Undo `_cut`, with this many dimensions of heads."""
    x = jnp.moveaxis(x, (0, 2 + heads), (1, 2))
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], -1, *x.shape[3 + heads:])
