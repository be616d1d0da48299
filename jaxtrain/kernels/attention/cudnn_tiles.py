"""Tiled attention by cuDNN: a mask of one tile at a time, and none where all of a tile's pairs are seen.

With a mask cuDNN computes all pairs that it is given. In tiles, those in which no query sees a key are left out, and
the mask of a long row is never in memory. Backward, cuDNN is given the merged output and log-sum-exp, with which its
gradients are the contributions of a tile.

Shape suffixes: B batch, T and S queries and keys, H query heads, G key/value heads, K head width.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.base.annotations import PyTree
from jaxtrain.kernels.attention import cudnn_kernel, tiles
from jaxtrain.kernels.attention.tiles import Pull, Scoring, Tokens

F32 = jnp.float32
# Tokens along each side of a tile: kernels are fast for so many, and a mask takes 32 MB or 128 MB a row. Along a
# diagonal, half of what a tile computes is not seen, so shorter rows have the smaller ones.
SMALLER, LARGER = 4096, 8192
ALONG = 8  # tiles along a diagonal, if they can be of either size


def side_of(tokens: int, own: bool) -> int:
    """Return the most tokens along a side of a tile."""
    return min(LARGER, max(SMALLER, tokens // ALONG)) if own else LARGER


def fits(queries: int, keys: int, own: bool) -> bool:
    """Return whether so many tokens make tiles that cuDNN takes: their sides must be even."""
    return not any(tokens // tiles.count(tokens, side_of(queries, own)) % 2 for tokens in (queries, keys))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(window: int, q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array,
              segments_BT: jax.Array) -> jax.Array:
    """Return causal attention of whole rows."""
    return _attention_forward(window, q_BTHK, k_BTGK, v_BTGK, segments_BT)[0]


def _attention_forward(window, q, k, v, segments):
    tokens = Tokens(jnp.arange(q.shape[1]), segments)
    out, lse = forward(q, k, v, tokens, tokens, Scoring(window), own=True)
    out, lse = checkpoint_name(out.astype(q.dtype), "attention"), checkpoint_name(lse, "attention")
    return out, (q, k, v, segments, out, lse)


def _attention_backward(window, saved, dout):
    q, k, v, segments, out, lse = saved
    tokens = Tokens(jnp.arange(q.shape[1]), segments)
    with jax.named_scope("attention"):  # in a loop over layers it would lose the scope of the forward pass
        # cuDNN makes the sums of rows itself.
        gradients = backward(q, k, v, Pull(dout, out, lse, None), tokens, tokens, Scoring(window), own=True)
        return *(g.astype(x.dtype) for g, x in zip(gradients, (q, k, v), strict=True)), None


attention.defvjp(_attention_forward, _attention_backward)


def forward(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, queries: Tokens, keys: Tokens, scoring: Scoring,
            own: bool) -> tuple[jax.Array, jax.Array]:
    """Return what `tiles.forward` does."""
    side = side_of(len(queries.at), own)
    of_queries = _cut(q_BTHK, side), tiles.cut_tokens(queries, side)
    of_keys = _cut(k_BSGK, side), _cut(v_BSGK, side), tiles.cut_tokens(keys, side)

    def add(results, pair):
        (q, queries), (k, v, keys) = tiles.at(of_queries, pair[0]), tiles.at(of_keys, pair[1])
        result = tiles.at(results, pair[0])

        def computed(seen_BTS):
            out, lse = cudnn_kernel.part(q, k, v, seen_BTS)
            return tiles.merge(result, (out.astype(F32), lse))

        result = _by_pairs(queries, keys, scoring.window, lambda: result, computed)
        return tiles.put(results, pair[0], result), None

    shape = of_queries[0].shape
    nothing = jnp.zeros((*shape[:-1], v_BSGK.shape[-1]), F32), jnp.full(shape[:-1], tiles.NOTHING)
    (out, lse), _ = lax.scan(add, nothing, tiles.pairs(queries, keys, side, scoring.window, own))
    return _join(out), _join(lse)


def backward(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, pull: Pull, queries: Tokens, keys: Tokens,
             scoring: Scoring, own: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return what `tiles.backward` does."""
    side = side_of(len(queries.at), own)
    of_queries = _cut(q_BTHK, side), jax.tree.map(lambda x: _cut(x, side), pull), tiles.cut_tokens(queries, side)
    of_keys = _cut(k_BSGK, side), _cut(v_BSGK, side), tiles.cut_tokens(keys, side)

    def add(gradients, pair):
        (q, pull, queries), (k, v, keys) = tiles.at(of_queries, pair[0]), tiles.at(of_keys, pair[1])
        so_far = tiles.at(gradients[0], pair[0]), *tiles.at(gradients[1], pair[1])

        def computed(seen_BTS):
            return tuple(old + new for old, new in zip(so_far, cudnn_kernel.part_gradients(
                q, k, v, pull.pull, pull.out, pull.lse, seen_BTS), strict=True))

        dq, *dkv = _by_pairs(queries, keys, scoring.window, lambda: so_far, computed)
        return (tiles.put(gradients[0], pair[0], dq), tiles.put(gradients[1], pair[1], tuple(dkv))), None

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, F32), (of_queries[0], of_keys[:2]))
    (dq, (dk, dv)), _ = lax.scan(add, nothing, tiles.pairs(queries, keys, side, scoring.window, own))
    return _join(dq), _join(dk), _join(dv)


def _by_pairs(queries: Tokens, keys: Tokens, window: int, unchanged: Callable[[], PyTree],
              computed: Callable[[jax.Array | None], PyTree]) -> PyTree:
    """Return what is computed where some pair is seen: with a mask, or without one where all are."""
    some, all_seen = tiles.meet(queries, keys, window), tiles.all_seen(queries, keys, window)
    return lax.switch(some.astype(jnp.int32) + (some & all_seen), (
        unchanged, lambda: computed(tiles.seen(queries, keys, window)), lambda: computed(None)))


def _cut(x: jax.Array, side: int) -> jax.Array:
    """Cut [B, T, ...] into [tiles, B, T / tiles, ...]."""
    return jnp.moveaxis(x.reshape(len(x), tiles.count(x.shape[1], side), -1, *x.shape[2:]), 1, 0)


def _join(x: jax.Array) -> jax.Array:
    """Undo `_cut`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(len(x), -1, *x.shape[3:])
