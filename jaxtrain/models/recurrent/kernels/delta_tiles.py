"""The functions of delta_kernels.py and their gradients in tiles that fit the registers of GPUs.

Keys and values are cut into tiles of 32 channels, so that the largest matrix of a kernel is of 64 x 64 tokens. What
tiles need of earlier ones is read or computed again: it would not fit the registers.
Arguments and results are references to memory, of which a kernel loads and stores tiles.

Shape suffixes: C tokens of a chunk, K key width, V value width, X channels of a tile. `since` and `end` are as in
decay_tiles.py.
"""

import jax.numpy as jnp
from jax import lax

from jaxtrain.kernels.chunks.chunk_matrices import F32, inverse, product, row, tokens
from jaxtrain.kernels.chunks.chunk_tiles import by_tiles
from jaxtrain.models.recurrent.kernels.decay_tiles import (
    Ref,
    between,
    chunk_of,
    factors,
    not_after,
    of_decays,
    row_sums,
)


# ------------------------------------------------------------------------------------------------------- the kernels
def maps(k: Ref, v: Ref, g: Ref, beta: Ref, documents: Ref,
         added_KV: Ref, read_CK: Ref, write_CK: Ref, solve_CC: Ref) -> None:
    """Write what a chunk does to the state before it."""
    (C, K), V, chunk = k.shape, v.shape[1], chunk_of(g, beta, documents)
    i, j = tokens(C)
    solve = inverse(jnp.where((i > j) & chunk.within_CC, chunk.beta_C1 * _pairs(chunk, k, k), 0))
    solve_CC[...] = solve

    def of_keys(at, _):
        k_CX, (since, end) = k[:, at].astype(F32), factors(chunk, at)
        write_CX = k_CX * end
        write_CK[:, at] = write_CX
        read_CK[:, at] = product(solve, chunk.beta_C1 * since * k_CX)

        def of_values(values, _):
            new_CX = product(solve, chunk.beta_C1 * v[:, values].astype(F32))
            added_KV[at, values] = product(write_CX, new_CX, "00")

        by_tiles(V, of_values)

    by_tiles(K, of_keys)


def maps_gradients(k: Ref, v: Ref, g: Ref, beta: Ref, documents: Ref, solve_CC: Ref,
                   dadded_KV: Ref, dread_CK: Ref, dwrite_CK: Ref, dsolve_CC: Ref,
                   dk: Ref, dv: Ref, dg: Ref, dbeta: Ref) -> None:
    """Write the gradients of what `maps` reads."""
    (C, K), V, chunk = k.shape, v.shape[1], chunk_of(g, beta, documents)
    i, j = tokens(C)
    beta_C1 = chunk.beta_C1

    def of_values(at, carried):
        dsolve, dbeta_C1 = carried
        v_CX = v[:, at].astype(F32)

        def of_keys(keys, total):
            return total + product(k[:, keys].astype(F32) * factors(chunk, keys)[1], dadded_KV[keys, at])

        dnew_CX = by_tiles(K, of_keys, jnp.zeros(v_CX.shape, F32))
        dright_CX = product(solve_CC[...], dnew_CX, "00")
        dv[:, at] = (beta_C1 * dright_CX).astype(dv.dtype)
        return dsolve + product(dnew_CX, beta_C1 * v_CX, "11"), dbeta_C1 + row_sums(v_CX * dright_CX)

    def of_read(at, dsolve):
        return dsolve + product(dread_CK[:, at], beta_C1 * factors(chunk, at)[0] * k[:, at].astype(F32), "11")

    dsolve, dbeta_C1 = by_tiles(V, of_values, (dsolve_CC[...], jnp.zeros((C, 1), F32)))
    dsolve = by_tiles(K, of_read, dsolve)
    solve = solve_CC[...]
    dkept = jnp.where((i > j) & chunk.within_CC, -product(product(solve, dsolve, "00"), solve, "11"), 0)
    pairs_CC = _pairs(chunk, k, k)
    dbeta_C1 += row_sums(dkept * pairs_CC)
    dpairs_CC, dg_1C = of_decays(chunk, beta_C1 * dkept, pairs_CC)

    def of_keys(at, carried):
        dbeta_C1, dg_1C = carried
        k_CX, (since, end) = k[:, at].astype(F32), factors(chunk, at)

        def of_added(values, total):
            return total + product(v[:, values].astype(F32), dadded_KV[at, values], "11")

        dwrite_CX = dwrite_CK[:, at] + product(solve_CC[...], beta_C1 * by_tiles(
            V, of_added, jnp.zeros(k_CX.shape, F32)))
        dright_CX = product(solve_CC[...], dread_CK[:, at], "00")
        dx_CX, dk_CX, dg_CX = _gradients_of_pairs(chunk, at, k_CX, k_CX, dpairs_CC)
        dk[:, at] = (dx_CX + dk_CX + beta_C1 * since * dright_CX + end * dwrite_CX).astype(dk.dtype)
        dsince_CX = since * k_CX * dright_CX
        dg_1C = _add_decay(chunk, dg, at, beta_C1 * dsince_CX, end * k_CX * dwrite_CX, dg_CX, dg_1C)
        return dbeta_C1 + row_sums(dsince_CX), dg_1C

    dbeta_C1, dg_1C = by_tiles(K, of_keys, (dbeta_C1, dg_1C))
    dbeta[...] = row(dbeta_C1)
    if chunk.of_heads:
        dg[...] = dg_1C


def outputs(q: Ref, k: Ref, v: Ref, g: Ref, beta: Ref, documents: Ref, solve_CC: Ref, state_KV: Ref, y: Ref) -> None:
    """Write the results of a chunk's tokens, given the state before it."""
    K, V, chunk = k.shape[1], v.shape[1], chunk_of(g, beta, documents)
    _, move_CC = _moves(chunk, q, k, solve_CC)

    def of_values(at, _):
        def of_keys(keys, total):
            since, _ = factors(chunk, keys)
            kept_CX = product(move_CC, chunk.beta_C1 * since * k[:, keys].astype(F32))
            return total + product(since * q[:, keys].astype(F32) - kept_CX, state_KV[keys, at])

        new_CX = product(move_CC, chunk.beta_C1 * v[:, at].astype(F32))
        y[:, at] = by_tiles(K, of_keys, new_CX).astype(y.dtype)

    by_tiles(V, of_values)


def outputs_gradients(q: Ref, k: Ref, v: Ref, g: Ref, beta: Ref, documents: Ref, solve_CC: Ref, state_KV: Ref, dy: Ref,
                      dq: Ref, dk: Ref, dv: Ref, dg: Ref, dbeta: Ref, dsolve_CC: Ref, dstate_KV: Ref) -> None:
    """Write the gradients of what `outputs` reads."""
    (C, K), V, chunk = k.shape, v.shape[1], chunk_of(g, beta, documents)
    beta_C1 = chunk.beta_C1
    seen_CC, move_CC = _moves(chunk, q, k, solve_CC)

    def of_values(at, carried):
        dmove, dbeta_C1 = carried
        dy_CX = dy[:, at].astype(F32)

        def of_read(keys, total):
            return total - product(factors(chunk, keys)[0] * k[:, keys].astype(F32), state_KV[keys, at])

        error_CX = by_tiles(K, of_read, v[:, at].astype(F32))
        derror_CX = product(move_CC, dy_CX, "00")  # before beta
        dv[:, at] = (beta_C1 * derror_CX).astype(dv.dtype)
        return dmove + product(dy_CX, beta_C1 * error_CX, "11"), dbeta_C1 + row_sums(error_CX * derror_CX)

    dmove, dbeta_C1 = by_tiles(V, of_values, (jnp.zeros((C, C), F32), jnp.zeros((C, 1), F32)))
    dbeta[...] = row(dbeta_C1)
    dsolve_CC[...] = product(seen_CC, dmove, "00")
    i, j = tokens(C)
    dseen = jnp.where((i >= j) & chunk.within_CC, product(dmove, solve_CC[...], "11"), 0)
    dpairs_CC, dg_1C = of_decays(chunk, dseen, seen_CC)

    def of_keys(at, dg_1C):
        q_CX, k_CX, (since, _) = q[:, at].astype(F32), k[:, at].astype(F32), factors(chunk, at)

        read_CX = since * q_CX - product(move_CC, chunk.beta_C1 * since * k_CX)

        def of_outputs(values, total):
            dy_CX = dy[:, values].astype(F32)
            dstate_KV[at, values] = product(read_CX, dy_CX, "00")
            return total + product(dy_CX, state_KV[at, values], "11")

        dq_CX = by_tiles(V, of_outputs, jnp.zeros(q_CX.shape, F32))
        dk_CX = -beta_C1 * product(move_CC, dq_CX, "00")
        ddirect_CX, dlast_CX, dg_CX = _gradients_of_pairs(chunk, at, q_CX, k_CX, dpairs_CC)
        dq[:, at] = (ddirect_CX + since * dq_CX).astype(dq.dtype)
        dk[:, at] = (dlast_CX + since * dk_CX).astype(dk.dtype)
        return _add_decay(chunk, dg, at, since * (q_CX * dq_CX + k_CX * dk_CX), None, dg_CX, dg_1C)

    dg_1C = by_tiles(K, of_keys, dg_1C)
    if chunk.of_heads:
        dg[...] = dg_1C


def _moves(chunk, q, k, solve_CC):
    """Return what tokens see of each other's values, and of what is to be written for them."""
    i, j = tokens(len(k))
    seen_CC = jnp.where((i >= j) & chunk.within_CC, _pairs(chunk, q, k), 0)
    return seen_CC, product(seen_CC, solve_CC[...])


# --------------------------------------------------------------------------------------------------------- the decays
def _pairs(chunk, x, k):
    """Return the product of each token's x with each earlier one's k, or its own, decayed in between; others are 0 or
    not of use.
    """
    C, K = k.shape

    def of_tile(at, total):
        if chunk.of_heads:
            return total + product(x[:, at], k[:, at], "11")
        x_CX, k_CX = x[:, at].astype(F32), k[:, at].astype(F32)
        i, j = tokens(C)

        def of_level(level, total):
            across, late, early = _halves(level, chunk.g[:, at])
            return total + jnp.where(across, product(x_CX * late, k_CX * early, "11"), 0)

        return lax.fori_loop(0, C.bit_length() - 1, of_level, total + jnp.where(i == j, row_sums(x_CX * k_CX), 0))

    found = by_tiles(K, of_tile, jnp.zeros((C, C), F32))
    return found * between(chunk) if chunk.of_heads else found


def _halves(level, g_CX):
    """Return which pairs are of the halves of a stretch of 2 ** (level + 1) tokens, how much the later token decayed
    since the middle of the stretch, and the earlier one until it (as chunks.products_by_halves).
    """
    i, j = tokens(len(g_CX))
    across = (i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level)
    late, early = (jnp.exp(product(which.astype(F32), g_CX, exact=True)) for which in _of_half(level, len(g_CX)))
    return across, late, early


def _of_half(level, size):
    i, j = tokens(size)
    half = i >> level == j >> level
    return half & (j <= i), half & (j > i)


def _gradients_of_pairs(chunk, at, x_CX, k_CX, d_CC):
    """Return the gradients of tiles of x and k, and of g if it has channels."""
    if chunk.of_heads:
        return product(d_CC, k_CX), product(d_CC, x_CX, "00"), 0.0
    i, j = tokens(len(d_CC))
    own_C1 = row_sums(jnp.where(i == j, d_CC, 0))

    def of_level(level, found):
        dx, dk, dg = found
        across, late, early = _halves(level, chunk.g[:, at])
        d = jnp.where(across, d_CC, 0)
        dlate = late * product(d, k_CX * early)
        dearly = early * product(d, x_CX * late, "00")
        for which, change in zip(_of_half(level, len(d)), (dlate * x_CX, dearly * k_CX), strict=True):
            dg += product(which.astype(F32), change, "00", exact=True)
        return dx + dlate, dk + dearly, dg

    start = own_C1 * k_CX, own_C1 * x_CX, jnp.zeros(k_CX.shape, F32)
    return lax.fori_loop(0, len(d_CC).bit_length() - 1, of_level, start)


def _add_decay(chunk, dg, at, dsince_CX, dend_CX, dg_CX, dg_1C):
    """Add the gradients of a tile's decays: to dg_1C, which is returned, or into memory where channels decay."""
    since = not_after(len(chunk.beta_C1))
    if chunk.of_heads:
        dend_C1 = 0.0 if dend_CX is None else row_sums(dend_CX)
        return dg_1C + jnp.where(since, row_sums(dsince_CX), dend_C1).sum(0, keepdims=True)
    dg_CX += product(since.astype(F32), dsince_CX, "00", exact=True)
    if dend_CX is not None:
        dg_CX += product((~since).astype(F32), dend_CX, "00", exact=True)
    dg[:, at] = dg_CX
    return dg_1C

