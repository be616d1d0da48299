"""The forward kernel of `mosaic_attention`: tiles of scores in registers, an online softmax in float32.

A block of threads computes 128 queries of one head: two groups of warps take 64 each, and share the tiles of keys and
values that a third one copies to shared memory. It starts at the first key that any of the queries sees and ends at
their diagonal, or at the last one that any sees, so that other documents cost nothing.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, K width of queries and keys, V of values, Q queries
and S keys of a tile.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu

from jaxtrain.kernels.attention.packed.mosaic_tiles import (
    COMPUTING,
    HEIGHT,
    ROWS,
    across,
    added,
    feed,
    filled,
    load,
    product,
    scores_to_log2,
    staging,
    swizzled,
    visible,
)

# Keys of a tile, as registers allow (by the width of values), and tiles in shared memory.
KEYS, KEYS_OF_WIDE, STAGES = 128, 64, 2
LEAST = 1e-30  # in place of a sum of no weights
LOWEST = -1e30  # the greatest score of a query that has seen no key yet: finite, so that differences are numbers


def forward(q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGV: jax.Array, seen_BNT: jax.Array, *, soft_cap: float,
            scale: float, name: str, interpret: Any = None) -> tuple[jax.Array, jax.Array]:
    """Return attention over the keys that each query sees, and the log-sum-exp [B, H, T] to base 2.

    seen_BNT: the first of these keys and, if N is 2, the last; if N is 1, that is the query itself. A query whose last
    key is before its first sees none. Neither decreases in a row; keys may then be others than the queries' own tokens.
    """
    (B, T, H, K), (_, _, G, V), dtype, both_ways = q_BTHK.shape, v_BTGV.shape, q_BTHK.dtype, seen_BNT.shape[1] == 2
    rows, blocks = COMPUTING * HEIGHT, T // (COMPUTING * HEIGHT)
    keys = KEYS_OF_WIDE if V > 128 else KEYS
    tile, log2_of = (HEIGHT, keys), partial(scores_to_log2, scale=scale, soft_cap=soft_cap)

    def body(q, k, v, seen, out, lse, own_tiles, k_tiles, v_tiles, lse_tiles, q_came, k_came, v_came, k_done, v_done,
             turn, *staged):
        b, h, me = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("group")
        q_tiles, out_tiles = (own_tiles, own_tiles) if V == K else own_tiles
        block = blocks - 1 - lax.axis_index("block")  # late ones are the longest
        lowest = lax.div(seen[b, 0, block * rows], jnp.int32(keys))
        end = (block + 1) * rows - 1
        steps = lax.div((seen[b, 1, end] if both_ways else end) + keys, jnp.int32(keys)) - lowest  # none: at most 0

        @pl.when(me < COMPUTING)
        def _():
            gpu.set_max_registers(240 if K > 128 else 232, action="increase")
            begin = block * rows + me * HEIGHT
            own, q_tile, lse_tile = pl.ds(begin, HEIGHT), q_tiles.at[me], lse_tiles.at[me]
            gpu.copy_gmem_to_smem(q.at[b, own, h], q_tile, q_came.at[me])
            first_Q = load(seen.at[b, 0, own], ROWS, optimized=False)
            # All queries see the keys from the first of these to the last.
            complete = seen[b, 0, begin + HEIGHT - 1], seen[b, 1, begin] if both_ways else begin
            gpu.barrier_wait(q_came.at[me])

            def next_turn():
                """Let one group use the tensor cores while the other computes its softmax."""
                gpu.barrier_arrive(turn)
                gpu.barrier_wait(turn)

            def step(i, carry):
                out_QV, top_Q, sum_Q = carry
                slot, at = lax.rem(i, jnp.int32(STAGES)), (lowest + i) * keys
                gpu.barrier_wait(k_came.at[slot])

                def multiply(total):
                    gpu.wgmma(total, q_tile, k_tiles.at[slot].transpose((1, 0)))
                    next_turn()
                    return total[...]

                scores_QS = log2_of(pl.run_scoped(multiply, gpu.ACC(tile)))
                gpu.barrier_arrive(k_done.at[slot])

                def hide(scores):
                    last_Q = load(seen.at[b, 1, own], ROWS, optimized=False) if both_ways else None
                    return jnp.where(visible(begin, at, first_Q, last_Q, tile), scores, -jnp.inf)

                scores_QS = lax.cond((at < complete[0]) | (at + keys - 1 > complete[1]), hide, lambda scores: scores,
                                     scores_QS)
                new_Q = jnp.maximum(top_Q, scores_QS.max(axis=1))
                less_Q = jnp.exp2(top_Q - new_Q)
                weights_QS = jnp.exp2(scores_QS - across(new_Q, tile))
                sum_Q = sum_Q * less_Q + weights_QS.sum(axis=1)
                narrow_QS = weights_QS.astype(dtype)
                next_turn()
                gpu.barrier_wait(v_came.at[slot])
                less_QV, own_staged = across(less_Q, (HEIGHT, V)), [x.at[me] for x in staged]
                # Registers hold one sum of wide heads, not two. The interpreter knows no sums that begin with a value.
                if V > 128 and not interpret:
                    out_QV = added(out_QV * less_QV, narrow_QS, v_tiles.at[slot], *own_staged)
                else:
                    out_QV = out_QV * less_QV + product(narrow_QS, v_tiles.at[slot], (HEIGHT, V), *own_staged)
                gpu.barrier_arrive(v_done.at[slot])
                return out_QV, new_Q, sum_Q

            pl.when(me == 1)(next_turn)
            out_QV, top_Q, sum_Q = lax.fori_loop(0, steps, step, (
                filled(0.0, (HEIGHT, V)), filled(LOWEST, (HEIGHT,), ROWS), filled(0.0, (HEIGHT,), ROWS)))
            pl.when(me == 0)(next_turn)
            if both_ways:  # who sees no key gets zeros, and a log-sum-exp that has no weight where results are merged
                sum_Q = jnp.maximum(sum_Q, LEAST)
            if V != K:
                next_turn()  # the place of this group's results reaches into that of the other's queries
            out_tile = out_tiles.at[me]  # where queries were, which are not read any more
            out_tile[...] = (out_QV * across(1.0 / sum_Q, (HEIGHT, V))).astype(dtype)
            lse_tile[...] = top_Q + jnp.log2(sum_Q)
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(out_tile, out.at[b, own, h])
            gpu.copy_smem_to_gmem(lse_tile, lse.at[b, h, own])
            gpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(me == COMPUTING)
        def _():
            gpu.set_max_registers(24 if K > 128 else 40, action="decrease")
            g = lax.div(h, jnp.int32(H // G))

            def copies(i):
                there = pl.ds((lowest + i) * keys, keys)
                return (k_came, (k.at[b, there, g], k_tiles)), (v_came, (v.at[b, there, g], v_tiles))

            feed(steps, copies, (k_done, STAGES), (v_done, STAGES))

    own = [swizzled((COMPUTING, HEIGHT, width), dtype) for width in (K, V)]
    return gpu.kernel(
        body, out_type=(jax.ShapeDtypeStruct((B, T, H, V), dtype), jax.ShapeDtypeStruct((B, H, T), jnp.float32)),
        grid=(H, blocks, B), grid_names=("head", "block", "batch"), num_threads=COMPUTING + 1, thread_name="group",
        scratch_types=(
            own[0] if V == K else gpu.RefUnion(*own), swizzled((STAGES, keys, K), dtype),
            swizzled((STAGES, keys, V), dtype), gpu.SMEM((COMPUTING, HEIGHT), jnp.float32),
            gpu.Barrier(num_barriers=COMPUTING), gpu.Barrier(num_barriers=STAGES), gpu.Barrier(num_barriers=STAGES),
            *(gpu.Barrier(num_arrivals=COMPUTING, num_barriers=STAGES),) * 2, gpu.Barrier(num_arrivals=COMPUTING),
            *staging(tile, dtype, interpret)),
        kernel_name=name, interpret=interpret, compiler_params=gpu.CompilerParams(approx_math=True),
    )(q_BTHK, k_BTGK, v_BTGV, seen_BNT)
