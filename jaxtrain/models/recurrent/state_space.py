"""The state space model of Mamba-2 (SSD; Dao and Gu, 2024; arXiv 2405.21060), in chunks of 64 tokens.

    S_t = exp(dt_t A) S_(t-1) + dt_t B_t x_t^T,    y_t = C_t^T S_t

A head's state is [N, P] (published code often has [P, N]). Groups of consecutive heads share B and C.

Shape suffixes: B batch, T sequence, H heads, G groups of heads, N width of the state, P width of a head.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxtrain.kernels.chunks.chunk_kernels import by_chunk, choose_backend
from jaxtrain.models.recurrent import chunk_states, chunks
from jaxtrain.models.recurrent import sequence_parts as parts
from jaxtrain.models.recurrent.kernels import state_space_kernels

F32 = jnp.float32


def state_space(x_BTHP: jax.Array, dt_BTH: jax.Array, A_H: jax.Array, B_BTGN: jax.Array, C_BTGN: jax.Array,
                segments_BT: jax.Array | None = None, state_BHNP: jax.Array | None = None, *,
                kernel: str = "auto") -> tuple[jax.Array, jax.Array]:
    """Return y [B, T, H, P] in the dtype of x, without D x, and the last state [B, H, N, P] in float32.

    Args:
        dt_BTH: steps, after softplus and limits.
        A_H: below 0.
        segments_BT: a change of them begins a document, with no state.
        state_BHNP: the state before the row, which its first document continues.
        kernel: train.recurrent_kernel.
    """
    backend = choose_backend(kernel)
    B_BTGN, C_BTGN = (parts.for_all_heads(x, x_BTHP.shape[2]) for x in (B_BTGN, C_BTGN))
    by_head = (*parts.HEADS, None)
    names = (by_head, parts.HEADS, ("act_heads",), by_head, by_head, parts.TOKENS, parts.STATE)
    return chunk_states.named(*parts.on_own_rows(partial(_rows, backend), names, (by_head, parts.STATE))(
        x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN, segments_BT, state_BHNP))


@partial(jax.jit, static_argnums=(0, 1), inline=True)
@partial(jax.checkpoint, static_argnums=(0, 1),
         policy=jax.checkpoint_policies.save_only_these_names(chunk_states.SAVED))
def _rows(backend, n, x, dt, A_H, B, C, segments_BT, state):
    (H, P), (G, N) = x.shape[2:], B.shape[2:]
    state = jnp.zeros((x.shape[0], H, N, P), F32) if state is None else state.astype(F32)
    rows = parts.apart(n, x)
    within = chunks.documents(starts := parts.document_starts(n, rows, segments_BT))
    if backend != "xla":
        y, last = _by_kernels(backend, n, within, chunks.numbers(starts), state, A_H.astype(F32), *(
            chunks.cut(parts.apart(n, each)) for each in (x, dt[..., None].astype(F32), B, C)))
        return parts.together(n, chunks.join(y, rows.shape[1])), last
    x, dt, B, C = (chunks.cut(parts.apart(n, x.astype(F32))) for x in (x, dt[..., None], B, C))
    g = dt * A_H.astype(F32)[:, None, None] * within.inside
    x = dt * x

    def by_group(x):
        return x.reshape(*x.shape[:2], G, H // G, *x.shape[3:])

    decays = chunks.between(g) * within.pairs
    y = jnp.einsum("nbgij,nbgrij,nbgrjp->nbgrip", jnp.einsum("nbgik,nbgjk->nbgij", C, B), by_group(decays), by_group(x))
    added = jnp.einsum("nbgck,nbgrcp->nbgrkp", B, by_group(x * chunks.until_end(g) * within.to_end))
    begins, last = chunk_states.states(
        n, chunk_states.ChunkMaps(chunks.whole(g) * within.through, added.reshape(*x.shape[:3], N, P)), state)
    y += by_group(chunks.since_start(g) * within.from_before) * jnp.einsum(
        "nbgck,nbgrkp->nbgrcp", C, by_group(begins))
    return parts.together(n, chunks.join(y.reshape(x.shape), rows.shape[1])).astype(rows.dtype), last


def _by_kernels(backend, n, within, documents, state, A_H, x, dt, B, C):
    """Return the same of chunks by the kernels of what is within them, a group of heads at a time."""
    G, (H, N) = B.shape[2], state.shape[1:3]
    g = dt * A_H[:, None, None] * within.inside

    def grouped(each, *sides):
        return each.reshape(*each.shape[:2], G, H // G, *sides)

    size, P = x.shape[3:]
    given = grouped(x, size, P), grouped(g, 1, size), grouped(dt, 1, size), documents
    added, = by_chunk(state_space_kernels.MAPS, backend, G, B, *given)
    begins, last = chunk_states.states(n, chunk_states.ChunkMaps(
        chunks.whole(g) * within.through, added.reshape(*x.shape[:3], N, P)), state)
    y, = by_chunk(state_space_kernels.OUTPUTS, backend, G, C, B, *given, grouped(begins, N, P))
    return y.reshape(x.shape), last


def state_space_step(x_B1HP: jax.Array, dt_B1H: jax.Array, A_H: jax.Array, B_B1GN: jax.Array, C_B1GN: jax.Array,
                     state_BHNP: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `state_space` of one token a row, and the state after it."""
    B_B1GN, C_B1GN = (parts.for_all_heads(x, x_B1HP.shape[2]) for x in (B_B1GN, C_B1GN))
    by_head, heads = ("batch", None, "act_heads", None), ("batch", None, "act_heads")
    return parts.on_own_rows(_step, (by_head, heads, ("act_heads",), by_head, by_head, parts.STATE),
                             (by_head, parts.STATE))(x_B1HP, dt_B1H, A_H, B_B1GN, C_B1GN, state_BHNP)


@partial(jax.jit, static_argnums=0, inline=True)
def _step(n, x, dt, A_H, B, C, state):
    B, C = (jnp.repeat(y, x.shape[2] // y.shape[2], axis=2) for y in (B, C))
    new, dt, B, C = (y[:, 0].astype(F32) for y in (x, dt, B, C))
    state = jnp.exp(dt * A_H.astype(F32))[..., None, None] * state.astype(F32) + (
        B[..., None] * (dt[..., None] * new)[:, :, None])
    return jnp.einsum("bhn,bhnp->bhp", C, state)[:, None].astype(x.dtype), state
