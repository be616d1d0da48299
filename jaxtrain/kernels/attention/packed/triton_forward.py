"""The forward kernel of `triton_attention`: a tile of scores at a time, an online softmax in float32.

A block of threads computes some queries of one head. It starts at the first key that any of them sees and ends at
their diagonal, or at the last one that any sees, so that other documents cost nothing.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, K width of keys, V of values, Q queries
and S keys of a tile.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.kernels.attention.packed.triton_tiles import Tiles, dot, kernel, load, log2_scores, sees, store

LOWEST = -1e30  # the greatest score of a query that has seen no key yet: finite, so that differences are numbers


def tiles_of(width: int) -> Tiles:
    """Return the tiles for heads of this width."""
    return Tiles(64, 32, 4, 2) if width > 128 else Tiles(128, 64, 8, 2) if width > 64 else Tiles(128, 64, 4, 3)


def forward(q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, seen_BNT: jax.Array, *, soft_cap: float,
            scale: float, name: str, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Return attention over the keys that each query sees, and the log-sum-exp [B, H, T] to base 2.

    seen_BNT: the first of these keys and, if N is 2, the last; if N is 1, that is the query itself.
    """
    (B, T, H, K), (*_, G, V) = q_BTHK.shape, v_BTGK.shape
    dtype, both_ways = q_BTHK.dtype, seen_BNT.shape[1] == 2
    tiles = tiles_of(K)
    blocks = T // tiles.queries

    def body(q, k, v, seen, out, lse, block, b, h):
        block, g = blocks - 1 - block, lax.div(h, jnp.int32(H // G))  # late ones are the longest
        begin = block * tiles.queries
        mine, last_place = tiles.at_query(begin), begin + tiles.queries - 1
        q_QK, first_Q = load(q, b, mine, h), load(seen, b, 0, mine)
        last_Q = load(seen, b, 1, mine) if both_ways else begin + jnp.arange(tiles.queries)
        lowest = lax.div(seen[b, 0, begin], jnp.int32(tiles.keys))
        highest = lax.div(seen[b, 1, last_place] if both_ways else last_place, jnp.int32(tiles.keys)) + 1

        def step(i, carry):
            out_QV, top_Q, sum_Q = carry
            theirs = tiles.at_key(i * tiles.keys)
            scores_QS = log2_scores(dot(q_QK, load(k, b, theirs, g).T), scale, soft_cap)
            scores_QS = jnp.where(sees(first_Q, last_Q, i * tiles.keys, tiles.keys), scores_QS, -jnp.inf)
            new_Q = jnp.maximum(top_Q, scores_QS.max(1))
            less_Q, weights_QS = jnp.exp2(top_Q - new_Q), jnp.exp2(scores_QS - new_Q[:, None])
            out_QV = out_QV * less_Q[:, None] + dot(weights_QS.astype(dtype), load(v, b, theirs, g))
            return out_QV, new_Q, sum_Q * less_Q + weights_QS.sum(1)

        numbers = (tiles.queries,)
        out_QV, top_Q, sum_Q = lax.fori_loop(lowest, highest, step, (
            jnp.zeros((tiles.queries, V), jnp.float32), jnp.full(numbers, LOWEST, jnp.float32),
            jnp.zeros(numbers, jnp.float32)))
        store(out, b, mine, h, values=out_QV / sum_Q[:, None])
        store(lse, b, h, mine, values=top_Q + jnp.log2(sum_Q))

    results = jax.ShapeDtypeStruct((B, T, H, V), dtype), jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    return kernel(body, results, (blocks, B, H), tiles, name, interpret)(q_BTHK, k_BTGK, v_BTGK, seen_BNT)
