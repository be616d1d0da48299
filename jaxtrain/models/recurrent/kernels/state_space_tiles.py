"""The functions of state_space_kernels.py and their gradients in tiles that fit the registers of GPUs.

B, C and heads are cut into tiles of 32 channels. Of the heads of a group, one after another is computed; what they
share is summed in registers. Arguments and results are references to memory, of which a kernel loads and stores tiles.

Shape suffixes: R heads of a group, C tokens of a chunk, N width of the state, P width of a head, X channels of a tile.
`since` and `end` are as in decay_tiles.py.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.kernels.chunks.chunk_matrices import F32, product, row, tokens
from jaxtrain.kernels.chunks.chunk_tiles import by_tiles
from jaxtrain.models.recurrent.kernels.decay_tiles import (
    Chunk,
    Ref,
    between,
    chunk_of,
    factors,
    not_after,
    of_decays,
    row_sums,
)


def maps(B: Ref, x: Ref, g: Ref, dt: Ref, documents: Ref, added_RNP: Ref) -> None:
    """Write what a chunk adds to the states before it."""
    def of_head(r, _):
        chunk, (_, end) = _head(r, g, dt, documents)

        def of_state(at, _):
            write_CX = B[:, at].astype(F32) * end

            def of_values(values, _):
                added_RNP[r, at, values] = product(write_CX, chunk.beta_C1 * x[r, :, values].astype(F32), "00")

            by_tiles(x.shape[2], of_values)

        by_tiles(B.shape[1], of_state)

    lax.fori_loop(0, len(x), of_head, None)


def maps_gradients(B: Ref, x: Ref, g: Ref, dt: Ref, documents: Ref, dadded_RNP: Ref,
                   dB: Ref, dx: Ref, dg: Ref, ddt: Ref) -> None:
    """Write the gradients of what `maps` reads."""
    (R, C, P), N = x.shape, B.shape[1]

    def of_head(r, _):
        chunk, (_, end) = _head(r, g, dt, documents)

        def of_values(at, ddt_C1):
            def of_state(states, total):
                return total + product(B[:, states].astype(F32), dadded_RNP[r, states, at])

            x_CX = x[r, :, at].astype(F32)
            dgiven_CX = end * by_tiles(N, of_state, jnp.zeros(x_CX.shape, F32))
            dx[r, :, at] = (chunk.beta_C1 * dgiven_CX).astype(dx.dtype)
            return ddt_C1 + row_sums(x_CX * dgiven_CX)

        ddt_C1 = by_tiles(P, of_values, jnp.zeros((C, 1), F32))
        ddt[r, :, :] = row(ddt_C1)
        # The gradient of the logarithm of `end` is the same sum, times dt.
        dg[r, :, :] = jnp.where(not_after(C), 0, chunk.beta_C1 * ddt_C1).sum(0, keepdims=True)

    lax.fori_loop(0, R, of_head, None)

    def of_state(at, _):
        def of_head(r, total):
            chunk, (_, end) = _head(r, g, dt, documents)

            def of_values(values, total):
                return total + product(chunk.beta_C1 * x[r, :, values].astype(F32), dadded_RNP[r, at, values], "11")

            return total + end * by_tiles(P, of_values, jnp.zeros(total.shape, F32))

        dB[:, at] = lax.fori_loop(0, R, of_head, jnp.zeros(B[:, at].shape, F32)).astype(dB.dtype)

    by_tiles(N, of_state)


def outputs(C: Ref, B: Ref, x: Ref, g: Ref, dt: Ref, documents: Ref, state_RNP: Ref, y: Ref) -> None:
    """Write the results of a chunk's tokens, given the states before it."""
    pairs_CC = _pairs(C, B)

    def of_head(r, _):
        chunk, (since, _) = _head(r, g, dt, documents)
        seen_CC = _seen(chunk, pairs_CC)

        def of_values(at, _):
            new_CX = product(seen_CC, chunk.beta_C1 * x[r, :, at].astype(F32))
            y[r, :, at] = (new_CX + since * _read(C, state_RNP, r, at)).astype(y.dtype)

        by_tiles(x.shape[2], of_values)

    lax.fori_loop(0, len(x), of_head, None)


def outputs_gradients(C: Ref, B: Ref, x: Ref, g: Ref, dt: Ref, documents: Ref, state_RNP: Ref, dy: Ref,
                      dC: Ref, dB: Ref, dx: Ref, dg: Ref, ddt: Ref, dstate_RNP: Ref) -> None:
    """Write the gradients of what `outputs` reads."""
    (R, T, P), N = x.shape, B.shape[1]
    pairs_CC = _pairs(C, B)

    def of_head(r, dpairs_CC):
        chunk, (since, _) = _head(r, g, dt, documents)
        seen_CC = _seen(chunk, pairs_CC)

        def of_values(at, carried):
            dseen_CC, ddt_C1, dsince_C1 = carried
            x_CX, dy_CX = x[r, :, at].astype(F32), dy[r, :, at].astype(F32)
            dgiven_CX = product(seen_CC, dy_CX, "00")
            dx[r, :, at] = (chunk.beta_C1 * dgiven_CX).astype(dx.dtype)

            def of_state(states, _):
                dstate_RNP[r, states, at] = product(since * C[:, states].astype(F32), dy_CX, "00")

            by_tiles(N, of_state)
            return (dseen_CC + product(dy_CX, chunk.beta_C1 * x_CX, "11"), ddt_C1 + row_sums(x_CX * dgiven_CX),
                    dsince_C1 + row_sums(dy_CX * _read(C, state_RNP, r, at)))

        nothing = jnp.zeros((T, T), F32), jnp.zeros((T, 1), F32), jnp.zeros((T, 1), F32)
        dseen_CC, ddt_C1, dsince_C1 = by_tiles(P, of_values, nothing)
        i, j = tokens(T)
        dhead_CC, dg_1C = of_decays(chunk, jnp.where((i >= j) & chunk.within_CC, dseen_CC, 0), seen_CC)
        ddt[r, :, :] = row(ddt_C1)
        dg[r, :, :] = dg_1C + jnp.where(not_after(T), since * dsince_C1, 0).sum(0, keepdims=True)
        return dpairs_CC + dhead_CC

    dpairs_CC = lax.fori_loop(0, R, of_head, jnp.zeros((T, T), F32))

    def of_state(at, _):
        def of_head(r, total):
            _, (since, _) = _head(r, g, dt, documents)

            def of_values(values, total):
                return total + product(dy[r, :, values].astype(F32), state_RNP[r, at, values], "11")

            return total + since * by_tiles(P, of_values, jnp.zeros(total.shape, F32))

        C_CX, B_CX = C[:, at].astype(F32), B[:, at].astype(F32)
        dC[:, at] = lax.fori_loop(0, R, of_head, product(dpairs_CC, B_CX)).astype(dC.dtype)
        dB[:, at] = product(dpairs_CC, C_CX, "00").astype(dB.dtype)

    by_tiles(N, of_state)


def _head(r, g: Ref, dt: Ref, documents: Ref) -> tuple[Chunk, tuple[jax.Array, ...]]:
    """Return the chunk of one head, and its `since` and `end`."""
    chunk = chunk_of(g[r, :, :], dt[r, :, :], documents)
    return chunk, factors(chunk, None)


def _pairs(C: Ref, B: Ref) -> jax.Array:
    """Return the product of each token's C with each token's B."""
    size = len(C)
    return by_tiles(B.shape[1], lambda at, total: total + product(C[:, at].astype(F32), B[:, at].astype(F32), "11"),
                    jnp.zeros((size, size), F32))


def _seen(chunk: Chunk, pairs_CC: jax.Array) -> jax.Array:
    """Return what tokens see of each other's values."""
    i, j = tokens(len(pairs_CC))
    return jnp.where((i >= j) & chunk.within_CC, pairs_CC * between(chunk), 0)


def _read(C: Ref, state_RNP: Ref, r, at) -> jax.Array:
    """Return what tokens read of the state before the chunk, but for decays."""
    def of_state(states, total):
        return total + product(C[:, states].astype(F32), state_RNP[r, states, at])

    shape = len(C), state_RNP[r, 0:1, at].shape[-1]
    return by_tiles(C.shape[1], of_state, jnp.zeros(shape, F32))
