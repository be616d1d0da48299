"""The backward kernels of `triton_attention`: one for the gradient by queries, one for those by keys and values.

Both compute tiles of weights again, from scores and the log-sum-exp of the forward kernel, and only those in which some
query sees some key. Gradients by keys and values are sums over all query heads that share them.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, K width of keys, V of values, Q queries
and S keys of a tile.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.kernels.attention.packed.triton_tiles import Tiles, dot, kernel, load, log2_scores, sees, slope, store


def dq_tiles(width: int) -> Tiles:
    """Return the tiles of the kernel by queries, for heads of this width."""
    return Tiles(64, 32, 8, 1) if width > 128 else Tiles(64, 64, 8, 2) if width > 64 else Tiles(128, 64, 8, 2)


def dkv_tiles(width: int) -> Tiles:
    """Return the tiles of the kernel by keys and values, for heads of this width."""
    return Tiles(32, 32, 8, 1) if width > 128 else Tiles(32, 64, 8, 2) if width > 64 else Tiles(64, 64, 8, 2)


def by_queries(q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, pull_BTHK: jax.Array, lse_BHT: jax.Array,
               delta_BHT: jax.Array, seen_BNT: jax.Array, *, soft_cap: float, scale: float, name: str,
               interpret: bool = False) -> jax.Array:
    """Return the gradient by queries.

    pull_BTHK: the gradient by the result; delta_BHT: for each row, the sum of its products with the result; seen_BNT:
    as forward.
    """
    (B, T, H, K), G, dtype, both_ways = q_BTHK.shape, k_BTGK.shape[2], q_BTHK.dtype, seen_BNT.shape[1] == 2
    tiles = dq_tiles(K)
    blocks = T // tiles.queries

    def body(q, k, v, pull, lse, delta, seen, dq, block, b, h):
        block, g = blocks - 1 - block, lax.div(h, jnp.int32(H // G))  # late ones are the longest
        begin = block * tiles.queries
        mine, last_place = tiles.at_query(begin), begin + tiles.queries - 1
        q_QK, pull_QV = load(q, b, mine, h), load(pull, b, mine, h)
        lse_Q, delta_Q, first_Q = load(lse, b, h, mine), load(delta, b, h, mine), load(seen, b, 0, mine)
        last_Q = load(seen, b, 1, mine) if both_ways else begin + jnp.arange(tiles.queries)
        lowest = lax.div(seen[b, 0, begin], jnp.int32(tiles.keys))
        highest = lax.div(seen[b, 1, last_place] if both_ways else last_place, jnp.int32(tiles.keys)) + 1

        def step(i, dq_QK):
            theirs = tiles.at_key(i * tiles.keys)
            k_SK = load(k, b, theirs, g)
            scores_QS = log2_scores(dot(q_QK, k_SK.T), scale, soft_cap)
            weights_QS = jnp.where(sees(first_Q, last_Q, i * tiles.keys, tiles.keys),
                                   jnp.exp2(scores_QS - lse_Q[:, None]), 0.0)
            pull_QS = dot(pull_QV, load(v, b, theirs, g).T)
            dscores_QS = slope(weights_QS, scores_QS, soft_cap) * (pull_QS - delta_Q[:, None])
            return dq_QK + dot(dscores_QS.astype(dtype), k_SK)

        dq_QK = lax.fori_loop(lowest, highest, step, jnp.zeros((tiles.queries, K), jnp.float32))
        store(dq, b, mine, h, values=dq_QK * scale)

    result = jax.ShapeDtypeStruct(q_BTHK.shape, dtype)
    return kernel(body, result, (blocks, B, H), tiles, name, interpret)(
        q_BTHK, k_BTGK, v_BTGK, pull_BTHK, lse_BHT, delta_BHT, seen_BNT)


def by_keys_and_values(q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, pull_BTHK: jax.Array,
                       lse_BHT: jax.Array, delta_BHT: jax.Array, seen_BNT: jax.Array, *, soft_cap: float,
                       scale: float, name: str, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Return the gradients by keys and values.

    seen_BNT: the last query that sees each key and, if N is 2, the first; if N is 1, that is the key itself.
    """
    (B, T, H, K), (*_, G, V) = q_BTHK.shape, v_BTGK.shape
    dtype, both_ways = q_BTHK.dtype, seen_BNT.shape[1] == 2
    tiles = dkv_tiles(K)

    def body(q, k, v, pull, lse, delta, seen, dk, dv, block, b, g):
        begin = block * tiles.keys  # early ones are the longest
        mine, last_place = tiles.at_key(begin), begin + tiles.keys - 1
        k_SK, v_SV, last_S = load(k, b, mine, g), load(v, b, mine, g), load(seen, b, 0, mine)
        first_S = load(seen, b, 1, mine) if both_ways else begin + jnp.arange(tiles.keys)
        lowest = lax.div(seen[b, 1, begin] if both_ways else begin, jnp.int32(tiles.queries))
        steps = lax.div(seen[b, 0, last_place], jnp.int32(tiles.queries)) + 1 - lowest  # of each head

        def step(i, carry):
            dk_SK, dv_SV = carry
            h, at = g * (H // G) + lax.div(i, steps), (lowest + lax.rem(i, steps)) * tiles.queries
            theirs = tiles.at_query(at)
            q_QK, pull_QV = load(q, b, theirs, h), load(pull, b, theirs, h)
            scores_SQ = log2_scores(dot(k_SK, q_QK.T), scale, soft_cap)
            weights_SQ = jnp.where(sees(first_S, last_S, at, tiles.queries),
                                   jnp.exp2(scores_SQ - load(lse, b, h, theirs)[None]), 0.0)
            dv_SV += dot(weights_SQ.astype(dtype), pull_QV)
            pull_SQ = dot(v_SV, pull_QV.T) - load(delta, b, h, theirs)[None]
            dscores_SQ = slope(weights_SQ, scores_SQ, soft_cap) * pull_SQ
            return dk_SK + dot(dscores_SQ.astype(dtype), q_QK), dv_SV

        dk_SK, dv_SV = lax.fori_loop(0, steps * (H // G), step, tuple(
            jnp.zeros((tiles.keys, width), jnp.float32) for width in (K, V)))
        store(dk, b, mine, g, values=dk_SK * scale)
        store(dv, b, mine, g, values=dv_SV)

    results = tuple(jax.ShapeDtypeStruct(x.shape, dtype) for x in (k_BTGK, v_BTGK))
    return kernel(body, results, (T // tiles.keys, B, G), tiles, name, interpret)(
        q_BTHK, k_BTGK, v_BTGK, pull_BTHK, lse_BHT, delta_BHT, seen_BNT)
