"""The backward kernels of `mosaic_attention`: one for the gradient by queries, one for those by keys and values.

Both compute tiles of weights again, from scores and the log-sum-exp of the forward kernel, and only those in which some
query sees some key. As there, two groups of warps compute and a third one copies. Gradients by keys and values are
sums over all query heads that share them, in registers.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, K width of queries and keys, V of values, Q queries
and S keys of a tile.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu

from jaxtrain.kernels.attention.packed.mosaic_tiles import (
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
from jaxtrain.kernels.attention.packed_attention import TOGETHER

# Of a tile, and tiles in shared memory, in turn those that are used last and first; as large as registers and shared
# memory allow.
DQ_KEYS, DQ_STAGES = 128, (2, 2)
CAPPED_DQ_KEYS, CAPPED_DQ_STAGES = 64, (4, 4)
DKV_QUERIES, DKV_STAGES = 64, (3, 3)
WIDE_KEYS, WIDE_STAGES, WIDEST_STAGES = 64, (2, 2), (2, 1)  # of heads wider than 128, and than 192


def by_queries(q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGV: jax.Array, pull_BTHV: jax.Array, lse_BHT: jax.Array,
               delta_BHT: jax.Array, seen_BNT: jax.Array, *, soft_cap: float, scale: float, name: str,
               interpret: Any = None) -> jax.Array:
    """Return the gradient by queries.

    pull_BTHV: the gradient by the result; delta_BHT: for each row, the sum of its products with the result; seen_BNT:
    as forward.
    """
    (B, T, H, K), (_, _, G, V), dtype, both_ways = q_BTHK.shape, v_BTGV.shape, q_BTHK.dtype, seen_BNT.shape[1] == 2
    rows, blocks = COMPUTING * HEIGHT, T // (COMPUTING * HEIGHT)
    keys, stages = (WIDE_KEYS, wide_stages(K)) if K > 128 else (
        (CAPPED_DQ_KEYS, CAPPED_DQ_STAGES) if soft_cap else (DQ_KEYS, DQ_STAGES))
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
                (slot, v_slot), at = (lax.rem(i, jnp.int32(n)) for n in stages), (lowest + i) * keys
                q_tile, pull_tile = q_tiles.at[hidden(me)], pull_tiles.at[hidden(me)]
                gpu.barrier_wait(k_came.at[slot])
                gpu.barrier_wait(v_came.at[v_slot])
                raw_QS, pull_QS = products([(q_tile, k_tiles.at[slot].transpose((1, 0))),
                                            (pull_tile, v_tiles.at[v_slot].transpose((1, 0)))], tile)
                gpu.barrier_arrive(v_done.at[v_slot])
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

            feed(steps, copies, (k_done, stages[0]), (v_done, stages[1]))

    own = [swizzled((COMPUTING, HEIGHT, width), dtype) for width in (K, V)]
    sent = [swizzled((n, keys, width), dtype) for n, width in zip(stages, (K, V), strict=True)]
    return gpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(q_BTHK.shape, dtype), grid=(H, blocks, B),
        grid_names=("head", "block", "batch"), num_threads=COMPUTING + 1, thread_name="group",
        scratch_types=(
            *own, *sent, gpu.Barrier(num_arrivals=2, num_barriers=COMPUTING),
            *(gpu.Barrier(num_barriers=n) for n in stages),
            *(gpu.Barrier(num_arrivals=COMPUTING, num_barriers=n) for n in stages), *staging(tile, dtype, interpret)),
        kernel_name=name, interpret=interpret, compiler_params=gpu.CompilerParams(approx_math=True),
    )(q_BTHK, k_BTGK, v_BTGV, pull_BTHV, lse_BHT, delta_BHT, seen_BNT)


def by_keys_and_values(*arrays: jax.Array, soft_cap: float, scale: float, name: str,
                       interpret: Any = None) -> tuple[jax.Array, ...]:
    """Return the gradients by keys and values: of wide heads, whose sums do not fit in registers together, one by one.

    arrays: as `by_queries` takes them; the numbers of the tokens seen are the last query that sees each key and, if
    there are two, the first; if there is one, that is the key itself.
    """
    how: Mapping[str, Any] = {"soft_cap": soft_cap, "scale": scale, "interpret": interpret}
    if arrays[0].shape[3] <= TOGETHER:
        return _by_keys(*arrays, of=("dk", "dv"), name=name, **how)
    return (_by_keys(*arrays, of=("dk",), name=f"{name}_dk", **how)[0],
            _by_keys(*arrays, of=("dv",), name=f"{name}_dv", **how)[0])


def _by_keys(q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGV: jax.Array, pull_BTHV: jax.Array, lse_BHT: jax.Array,
             delta_BHT: jax.Array, seen_BNT: jax.Array, *, of: tuple[str, ...], soft_cap: float, scale: float,
             name: str, interpret: Any = None) -> tuple[jax.Array, ...]:
    """Return the gradients by keys ("dk") and by values ("dv"), or one of them."""
    (B, T, H, K), (_, _, G, V), dtype, both_ways = q_BTHK.shape, v_BTGV.shape, q_BTHK.dtype, seen_BNT.shape[1] == 2
    rows, blocks = COMPUTING * HEIGHT, T // (COMPUTING * HEIGHT)
    alone = of == ("dv",) and V == K  # values are not read, and their gradient finds a place where keys were
    queries, widths = DKV_QUERIES, {"dk": K, "dv": V}
    stages = DKV_STAGES if K <= 128 else wide_stages(K) if "dk" in of else WIDE_STAGES
    tile, log2_of = (HEIGHT, queries), partial(scores_to_log2, scale=scale, soft_cap=soft_cap)

    def body(q, k, v, pull, lse, delta, seen, token, *refs):
        results = dict(zip(of, refs[:len(of)], strict=True))
        (k_tiles, v_tiles, q_tiles, pull_tiles, lse_tiles, delta_tiles, own_came, q_came, pull_came, q_done,
         pull_done, *staged) = refs[len(of):]
        places = {one: k_tiles if one == "dk" or alone else v_tiles for one in of}  # of results
        b, g, me = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("group")
        start = lax.axis_index("block") * rows  # early blocks are the longest
        lowest = lax.div(seen[b, 1, start] if both_ways else start, jnp.int32(queries))
        # Of each head; none: at most 0.
        steps = lax.div(seen[b, 0, start + rows - 1] + queries, jnp.int32(queries)) - lowest

        def place(i):  # the head and the first query of a step
            return g * (H // G) + lax.div(i, steps), (lowest + lax.rem(i, steps)) * queries

        def compute(*sums):
            totals, begin = dict(zip(of, sums, strict=True)), start + me * HEIGHT
            own = pl.ds(begin, HEIGHT)
            gpu.copy_gmem_to_smem(k.at[b, own, g], k_tiles.at[me], own_came.at[me])
            if "dk" in of:
                gpu.copy_gmem_to_smem(v.at[b, own, g], v_tiles.at[me], own_came.at[me])
            last_S = load(seen.at[b, 0, own], ROWS, optimized=False)
            # All queries from the first of these to the last see these keys.
            complete = seen[b, 1, begin + HEIGHT - 1] if both_ways else begin + HEIGHT - 1, seen[b, 0, begin]
            gpu.barrier_wait(own_came.at[me])

            def step(i, _):
                (slot, pull_slot), (_, at) = (lax.rem(i, jnp.int32(n)) for n in stages), place(i)
                q_tile, pull_tile = q_tiles.at[slot], pull_tiles.at[pull_slot]
                k_tile = k_tiles.at[hidden(me)]

                def hide(weights):
                    first = (across(load(seen.at[b, 1, own], ROWS, optimized=False), tile) if both_ways
                             else begin + gpu.broadcasted_iota(jnp.int32, tile, 0, layout=TILE))
                    # Loaded, since the compiler would keep numbers that it computes in registers all the time.
                    at_Q = load(token.at[pl.ds(at, queries)], COLUMNS, optimized=False)
                    token_SQ = across(at_Q, tile, 1)
                    return jnp.where((token_SQ >= first) & (token_SQ <= across(last_S, tile)), weights, 0.0)

                gpu.barrier_wait(q_came.at[slot])
                gpu.barrier_wait(pull_came.at[pull_slot])
                pairs = [(k_tile, q_tile)] + [(v_tiles.at[hidden(me)], pull_tile)] * ("dk" in of)
                raw_SQ, *pull_SQ = products([(mine, theirs.transpose((1, 0))) for mine, theirs in pairs], tile)
                scores_SQ = log2_of(raw_SQ)
                lse_Q = load(lse_tiles.at[slot], COLUMNS)
                weights_SQ = jnp.exp2(scores_SQ - across(lse_Q, tile, 1))
                weights_SQ = lax.cond((at < complete[0]) | (at + queries - 1 > complete[1]), hide,
                                      lambda weights: weights, weights_SQ)
                operands = {}
                if "dk" in of:
                    delta_Q = load(delta_tiles.at[pull_slot], COLUMNS)
                    dscores_SQ = slope(weights_SQ, scores_SQ, soft_cap) * (pull_SQ[0] - across(delta_Q, tile, 1))
                    operands["dk"] = dscores_SQ.astype(dtype), q_tile
                if "dv" in of:
                    operands["dv"] = weights_SQ.astype(dtype), pull_tile
                # Both at once, when only their narrow operands and the sums have to be in registers.
                for number, one in enumerate(sorted(of, reverse=True)):
                    multiply(totals[one], *operands[one], *(x.at[me] for x in staged[number:number + 1]))
                gpu.wgmma_wait(0)
                gpu.barrier_arrive(q_done.at[slot])
                gpu.barrier_arrive(pull_done.at[pull_slot])

            lax.fori_loop(0, steps * (H // G), step, None)
            for one, there in places.items():  # of what is not read any more
                sums = totals[one][...]
                there[me] = (sums * scale if one == "dk" else sums).astype(dtype)
            gpu.commit_smem()
            for one, there in places.items():
                gpu.copy_smem_to_gmem(there.at[me], results[one].at[b, own, g])
            gpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(me < COMPUTING)
        def _():
            gpu.set_max_registers(240, action="increase")
            pl.run_scoped(compute, *(gpu.ACC((HEIGHT, widths[one])) for one in of))

        @pl.when(me == COMPUTING)
        def _():
            gpu.set_max_registers(24, action="decrease")

            def copies(i):
                h, at = place(i)
                there = pl.ds(at, queries)
                deltas = [(delta.at[b, h, there], delta_tiles)] * ("dk" in of)
                return ((q_came, (q.at[b, there, h], q_tiles), (lse.at[b, h, there], lse_tiles)),
                        (pull_came, (pull.at[b, there, h], pull_tiles), *deltas))

            feed(steps * (H // G), copies, (q_done, stages[0]), (pull_done, stages[1]))

    own = swizzled((COMPUTING, HEIGHT, K), dtype)
    sent = [swizzled((n, queries, width), dtype) for n, width in zip(stages, (K, V), strict=True)]
    values = swizzled((1, 8, 64) if alone else (COMPUTING, HEIGHT, V), dtype)
    numbers, arrivals = [gpu.SMEM((n, queries), jnp.float32) for n in stages], 2 if "dk" in of else 1
    return gpu.kernel(
        body, out_type=tuple(
            jax.ShapeDtypeStruct((*k_BTGK.shape[:3], widths[one]), dtype) for one in of), grid=(G, blocks, B),
        grid_names=("head", "block", "batch"), num_threads=COMPUTING + 1, thread_name="group",
        scratch_types=(
            own, values, *sent, *numbers, gpu.Barrier(num_arrivals=arrivals, num_barriers=COMPUTING),
            *(gpu.Barrier(num_arrivals=each, num_barriers=n) for each, n in zip((2, arrivals), stages, strict=True)),
            *(gpu.Barrier(num_arrivals=COMPUTING, num_barriers=n) for n in stages),
            *len(of) * staging(tile, dtype, interpret)),
        kernel_name=name, interpret=interpret, compiler_params=gpu.CompilerParams(approx_math=True),
    )(q_BTHK, k_BTGK, v_BTGV, pull_BTHV, lse_BHT, delta_BHT, seen_BNT, jnp.arange(T, dtype=jnp.int32))


def wide_stages(width: int) -> tuple[int, int]:
    """Return how many tiles shared memory has for heads wider than 128."""
    return WIDE_STAGES if width <= 192 else WIDEST_STAGES


def products(pairs: Sequence[tuple[jax.Ref, jax.Ref]], tile: tuple[int, int]) -> tuple[jax.Array, ...]:
    """Return products of matrices in shared memory, begun together."""
    def compute(*totals):
        for total, pair in zip(totals, pairs, strict=True):
            gpu.wgmma(total, *pair)
        return tuple(total[...] for total in totals)
    return pl.run_scoped(compute, *(gpu.ACC(tile),) * len(pairs))


def slope(weights: jax.Array, scores_log2: jax.Array, soft_cap: float) -> jax.Array:
    """Return weights times the derivative of capped scores by those before."""
    if not soft_cap:
        return weights
    tanh = scores_log2 * (1 / (soft_cap * LOG2E))
    return weights * (1.0 - tanh * tanh)
