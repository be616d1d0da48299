"""The backward kernels of `mosaic_attention`: one for the gradient by queries, one for those by keys and values.

Both compute tiles of weights again, from scores and the log-sum-exp of the forward kernel, and only those in which some
query sees some key. As there, two groups of warps compute and a third one copies. Gradients by keys and values are
sums over all query heads that share them, in registers.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, K head width, Q queries and S keys of a tile.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu

from jaxtrain.kernels.attention.mosaic_tiles import (
    COLUMNS,
    COMPUTING,
    HEIGHT,
    LOG2E,
    ROWS,
    TILE,
    across,
    feed,
    hidden,
    load,
    multiply,
    scores_to_log2,
    staging,
    swizzled,
    visible,
)

# Of a tile, and tiles in shared memory; as large as registers allow.
DQ_KEYS, DQ_STAGES = 128, 2
CAPPED_DQ_KEYS, CAPPED_DQ_STAGES = 64, 4
DKV_QUERIES, DKV_STAGES = 64, 3


def by_queries(q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, pull_BTHK: jax.Array, lse_BHT: jax.Array,
               delta_BHT: jax.Array, seen_BNT: jax.Array, *, soft_cap: float, scale: float, name: str,
               interpret: Any = None) -> jax.Array:
    """Return the gradient by queries.

    pull_BTHK: the gradient by the result; delta_BHT: for each row, the sum of its products with the result; seen_BNT:
    as forward.
    """
    (B, T, H, K), G, dtype, both_ways = q_BTHK.shape, k_BTGK.shape[2], q_BTHK.dtype, seen_BNT.shape[1] == 2
    rows, blocks = COMPUTING * HEIGHT, T // (COMPUTING * HEIGHT)
    keys, stages = (CAPPED_DQ_KEYS, CAPPED_DQ_STAGES) if soft_cap else (DQ_KEYS, DQ_STAGES)
    tile, log2_of = (HEIGHT, keys), partial(scores_to_log2, scale=scale, soft_cap=soft_cap)

    def body(q, k, v, pull, lse, delta, seen, dq, q_tiles, pull_tiles, k_tiles, v_tiles, own_came, k_came, v_came,
             k_done, v_done, *staged):
        b, h, me = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("group")
        block = blocks - 1 - lax.axis_index("block")  # late ones are the longest
        lowest = lax.div(seen[b, 0, block * rows], jnp.int32(keys))
        end = (block + 1) * rows - 1
        steps = lax.div((seen[b, 1, end] if both_ways else end) + keys, jnp.int32(keys)) - lowest  # none: at most 0

        def compute(total):
            begin = block * rows + me * HEIGHT
            own, q_tile, pull_tile = pl.ds(begin, HEIGHT), q_tiles.at[me], pull_tiles.at[me]
            gpu.copy_gmem_to_smem(q.at[b, own, h], q_tile, own_came.at[me])
            gpu.copy_gmem_to_smem(pull.at[b, own, h], pull_tile, own_came.at[me])
            lse_Q, delta_Q = (load(ref.at[b, h, own], ROWS, optimized=False) for ref in (lse, delta))
            first_Q = load(seen.at[b, 0, own], ROWS, optimized=False)
            # All queries see the keys from the first of these to the last.
            complete = seen[b, 0, begin + HEIGHT - 1], seen[b, 1, begin] if both_ways else begin
            gpu.barrier_wait(own_came.at[me])

            def step(i, _):
                slot, at = lax.rem(i, jnp.int32(stages)), (lowest + i) * keys
                q_tile, pull_tile = q_tiles.at[hidden(me)], pull_tiles.at[hidden(me)]
                gpu.barrier_wait(k_came.at[slot])
                gpu.barrier_wait(v_came.at[slot])
                raw_QS, pull_QS = two_products((q_tile, k_tiles.at[slot].transpose((1, 0))),
                                               (pull_tile, v_tiles.at[slot].transpose((1, 0))), tile)
                gpu.barrier_arrive(v_done.at[slot])
                scores_QS = log2_of(raw_QS)
                weights_QS = jnp.exp2(scores_QS - across(lse_Q, tile))

                def hide(weights):
                    last_Q = load(seen.at[b, 1, own], ROWS, optimized=False) if both_ways else None
                    return jnp.where(visible(begin, at, first_Q, last_Q, tile), weights, 0.0)

                weights_QS = lax.cond((at < complete[0]) | (at + keys - 1 > complete[1]), hide,
                                      lambda weights: weights, weights_QS)
                dscores_QS = slope(weights_QS, scores_QS, soft_cap) * (pull_QS - across(delta_Q, tile))
                multiply(total, dscores_QS.astype(dtype), k_tiles.at[slot], *(x.at[me] for x in staged))
                gpu.wgmma_wait(0)
                gpu.barrier_arrive(k_done.at[slot])

            lax.fori_loop(0, steps, step, None)
            q_tile[...] = (total[...] * scale).astype(dtype)
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(q_tile, dq.at[b, own, h])
            gpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(me < COMPUTING)
        def _():
            gpu.set_max_registers(240, action="increase")
            pl.run_scoped(compute, gpu.ACC((HEIGHT, K)))

        @pl.when(me == COMPUTING)
        def _():
            gpu.set_max_registers(24, action="decrease")
            g = lax.div(h, jnp.int32(H // G))

            def copies(i):
                there = pl.ds((lowest + i) * keys, keys)
                return (k_came, (k.at[b, there, g], k_tiles)), (v_came, (v.at[b, there, g], v_tiles))

            feed(steps, stages, copies, k_done, v_done)

    own, sent = swizzled((COMPUTING, HEIGHT, K), dtype), swizzled((stages, keys, K), dtype)
    return gpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(q_BTHK.shape, dtype), grid=(H, blocks, B),
        grid_names=("head", "block", "batch"), num_threads=COMPUTING + 1, thread_name="group",
        scratch_types=(
            own, own, sent, sent, gpu.Barrier(num_arrivals=2, num_barriers=COMPUTING),
            *(gpu.Barrier(num_barriers=stages),) * 2,
            *(gpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages),) * 2, *staging(tile, dtype, interpret)),
        kernel_name=name, interpret=interpret, compiler_params=gpu.CompilerParams(approx_math=True),
    )(q_BTHK, k_BTGK, v_BTGK, pull_BTHK, lse_BHT, delta_BHT, seen_BNT)


def by_keys_and_values(q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, pull_BTHK: jax.Array,
                       lse_BHT: jax.Array, delta_BHT: jax.Array, seen_BNT: jax.Array, *, soft_cap: float,
                       scale: float, name: str, interpret: Any = None) -> tuple[jax.Array, jax.Array]:
    """Return the gradients by keys and values.

    seen_BNT: the last query that sees each key and, if N is 2, the first; if N is 1, that is the key itself.
    """
    (B, T, H, K), G, dtype, both_ways = q_BTHK.shape, k_BTGK.shape[2], q_BTHK.dtype, seen_BNT.shape[1] == 2
    rows, blocks = COMPUTING * HEIGHT, T // (COMPUTING * HEIGHT)
    tile, log2_of = (HEIGHT, DKV_QUERIES), partial(scores_to_log2, scale=scale, soft_cap=soft_cap)

    def body(q, k, v, pull, lse, delta, seen, token, dk, dv, k_tiles, v_tiles, q_tiles, pull_tiles, lse_tiles,
             delta_tiles, own_came, q_came, pull_came, q_done, pull_done, *staged):
        b, g, me = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("group")
        start = lax.axis_index("block") * rows  # early blocks are the longest
        lowest = lax.div(seen[b, 1, start] if both_ways else start, jnp.int32(DKV_QUERIES))
        # Of each head; none: at most 0.
        steps = lax.div(seen[b, 0, start + rows - 1] + DKV_QUERIES, jnp.int32(DKV_QUERIES)) - lowest

        def place(i):  # the head and the first query of a step
            return g * (H // G) + lax.div(i, steps), (lowest + lax.rem(i, steps)) * DKV_QUERIES

        def compute(dk_total, dv_total):
            begin = start + me * HEIGHT
            own, k_tile, v_tile = pl.ds(begin, HEIGHT), k_tiles.at[me], v_tiles.at[me]
            gpu.copy_gmem_to_smem(k.at[b, own, g], k_tile, own_came.at[me])
            gpu.copy_gmem_to_smem(v.at[b, own, g], v_tile, own_came.at[me])
            last_S = load(seen.at[b, 0, own], ROWS, optimized=False)
            # All queries from the first of these to the last see these keys.
            complete = seen[b, 1, begin + HEIGHT - 1] if both_ways else begin + HEIGHT - 1, seen[b, 0, begin]
            gpu.barrier_wait(own_came.at[me])

            def step(i, _):
                slot, (_, at) = lax.rem(i, jnp.int32(DKV_STAGES)), place(i)
                q_tile, pull_tile = q_tiles.at[slot], pull_tiles.at[slot]
                k_tile, v_tile = k_tiles.at[hidden(me)], v_tiles.at[hidden(me)]

                def hide(weights):
                    first = (across(load(seen.at[b, 1, own], ROWS, optimized=False), tile) if both_ways
                             else begin + gpu.broadcasted_iota(jnp.int32, tile, 0, layout=TILE))
                    # Loaded, since the compiler would keep numbers that it computes in registers all the time.
                    at_Q = load(token.at[pl.ds(at, DKV_QUERIES)], COLUMNS, optimized=False)
                    queries = across(at_Q, tile, 1)
                    return jnp.where((queries >= first) & (queries <= across(last_S, tile)), weights, 0.0)

                gpu.barrier_wait(q_came.at[slot])
                gpu.barrier_wait(pull_came.at[slot])
                raw_SQ, pull_SQ = two_products((k_tile, q_tile.transpose((1, 0))),
                                               (v_tile, pull_tile.transpose((1, 0))), tile)
                scores_SQ = log2_of(raw_SQ)
                lse_Q = load(lse_tiles.at[slot], COLUMNS)
                weights_SQ = jnp.exp2(scores_SQ - across(lse_Q, tile, 1))
                weights_SQ = lax.cond((at < complete[0]) | (at + DKV_QUERIES - 1 > complete[1]), hide,
                                      lambda weights: weights, weights_SQ)
                delta_Q = load(delta_tiles.at[slot], COLUMNS)
                dscores_SQ = slope(weights_SQ, scores_SQ, soft_cap) * (pull_SQ - across(delta_Q, tile, 1))
                # Both at once, when only their narrow operands and the sums have to be in registers.
                multiply(dv_total, weights_SQ.astype(dtype), pull_tile, *(x.at[me] for x in staged[:1]))
                multiply(dk_total, dscores_SQ.astype(dtype), q_tile, *(x.at[me] for x in staged[1:]))
                gpu.wgmma_wait(0)
                gpu.barrier_arrive(q_done.at[slot])
                gpu.barrier_arrive(pull_done.at[slot])

            lax.fori_loop(0, steps * (H // G), step, None)
            k_tile[...] = (dk_total[...] * scale).astype(dtype)
            v_tile[...] = dv_total[...].astype(dtype)
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(k_tile, dk.at[b, own, g])
            gpu.copy_smem_to_gmem(v_tile, dv.at[b, own, g])
            gpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(me < COMPUTING)
        def _():
            gpu.set_max_registers(240, action="increase")
            pl.run_scoped(compute, gpu.ACC((HEIGHT, K)), gpu.ACC((HEIGHT, K)))

        @pl.when(me == COMPUTING)
        def _():
            gpu.set_max_registers(24, action="decrease")

            def copies(i):
                h, at = place(i)
                there = pl.ds(at, DKV_QUERIES)
                return ((q_came, (q.at[b, there, h], q_tiles), (lse.at[b, h, there], lse_tiles)),
                        (pull_came, (pull.at[b, there, h], pull_tiles), (delta.at[b, h, there], delta_tiles)))

            feed(steps * (H // G), DKV_STAGES, copies, q_done, pull_done)

    own, sent = swizzled((COMPUTING, HEIGHT, K), dtype), swizzled((DKV_STAGES, DKV_QUERIES, K), dtype)
    numbers = gpu.SMEM((DKV_STAGES, DKV_QUERIES), jnp.float32)
    return gpu.kernel(
        body, out_type=(jax.ShapeDtypeStruct(k_BTGK.shape, dtype),) * 2, grid=(G, blocks, B),
        grid_names=("head", "block", "batch"), num_threads=COMPUTING + 1, thread_name="group",
        scratch_types=(
            own, own, sent, sent, numbers, numbers, gpu.Barrier(num_arrivals=2, num_barriers=COMPUTING),
            *(gpu.Barrier(num_arrivals=2, num_barriers=DKV_STAGES),) * 2,
            *(gpu.Barrier(num_arrivals=COMPUTING, num_barriers=DKV_STAGES),) * 2,
            *2 * staging(tile, dtype, interpret)),
        kernel_name=name, interpret=interpret, compiler_params=gpu.CompilerParams(approx_math=True),
    )(q_BTHK, k_BTGK, v_BTGK, pull_BTHK, lse_BHT, delta_BHT, seen_BNT, jnp.arange(T, dtype=jnp.int32))


def two_products(first: tuple[jax.Ref, jax.Ref], second: tuple[jax.Ref, jax.Ref],
                 tile: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Return two products of matrices in shared memory, begun together."""
    def compute(one, other):
        gpu.wgmma(one, *first)
        gpu.wgmma(other, *second)
        return one[...], other[...]
    return pl.run_scoped(compute, gpu.ACC(tile), gpu.ACC(tile))


def slope(weights: jax.Array, scores_log2: jax.Array, soft_cap: float) -> jax.Array:
    """Return weights times the derivative of capped scores by those before."""
    if not soft_cap:
        return weights
    tanh = scores_log2 * (1 / (soft_cap * LOG2E))
    return weights * (1.0 - tanh * tanh)
