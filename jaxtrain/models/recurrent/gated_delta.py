"""The gated delta rule (Gated DeltaNet; Yang, Kautz and Hatamizadeh, 2024; arXiv 2412.06464), in chunks of 64 tokens.

A head's state S [K, V] maps keys to values. A token lets it decay, and replaces what it holds for the token's key by
the token's value, as far as beta says:

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - k_t^T exp(g_t) S_(t-1)),    y_t = q_t^T S_t

What the tokens of a chunk write is the solution of a triangular system (the UT transform; Yang et al., 2024; arXiv
2406.06484), linear in the state before the chunk. So chunks are products of matrices, all at once, and only states pass
from one to the next (chunk_states.py). The backward pass keeps inputs and these states, and computes the rest again.

Shape suffixes: N chunks, B batch, T sequence, H heads, G groups of heads, C tokens of a chunk, K key width, V value
width.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxtrain.kernels.chunks.chunk_kernels import by_chunk, choose_backend
from jaxtrain.models.recurrent import chunk_states, chunks, unit_triangular
from jaxtrain.models.recurrent import sequence_parts as parts
from jaxtrain.models.recurrent.kernels import delta_kernels

F32 = jnp.float32
# Decayed products of queries with keys, and of keys with keys, [N, B, H, C, C], from q, k and g of chunks.
Products = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def gated_delta_rule(q_BTGK: jax.Array, k_BTGK: jax.Array, v_BTHV: jax.Array, g_BTH: jax.Array, beta_BTH: jax.Array,
                     segments_BT: jax.Array | None = None, state_BHKV: jax.Array | None = None, *,
                     kernel: str = "auto") -> tuple[jax.Array, jax.Array]:
    """Return y [B, T, H, V] in the dtype of v, and the last state [B, H, K, V] in float32.

    Args:
        q_BTGK: queries, already scaled. Queries and keys may be of groups of consecutive heads.
        k_BTGK: keys, already normalized.
        g_BTH: logarithms of decays, at most 0.
        segments_BT: a change of them begins a document, with no state.
        state_BHKV: the state before the row, which its first document continues.
        kernel: train.recurrent_kernel.
    """
    return delta_rule(_products, q_BTGK, k_BTGK, v_BTHV, g_BTH[..., None], beta_BTH, segments_BT, state_BHKV, kernel)


def _products(q, k, g):
    decay = chunks.between(g)
    return jnp.einsum("...ik,...jk->...ij", q, k) * decay, jnp.einsum("...ik,...jk->...ij", k, k) * decay


def delta_rule(products: Products, q_BTGK, k_BTGK, v_BTHV, g_BTHX, beta_BTH, segments_BT, state_BHKV, kernel
               ) -> tuple[jax.Array, jax.Array]:
    """Return the delta rule with decays per head (X is 1) or per key channel, by their `products`."""
    backend = choose_backend(kernel)
    q_BTGK, k_BTGK = (parts.for_all_heads(x, v_BTHV.shape[2]) for x in (q_BTGK, k_BTGK))
    by_head = (*parts.HEADS, None)
    return chunk_states.named(*parts.on_own_rows(
        partial(_rows, products, backend), (*(by_head,) * 4, parts.HEADS, parts.TOKENS, parts.STATE),
        (by_head, parts.STATE))(
        q_BTGK, k_BTGK, v_BTHV, g_BTHX, beta_BTH, segments_BT, state_BHKV))


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
@partial(jax.checkpoint, static_argnums=(0, 1, 2),
         policy=jax.checkpoint_policies.save_only_these_names(chunk_states.SAVED))
def _rows(products, backend, n, q, k, v, g, beta, segments_BT, state):
    heads, (K, V) = v.shape[2], (k.shape[-1], v.shape[-1])
    state = jnp.zeros((v.shape[0], heads, K, V), F32) if state is None else state.astype(F32)
    rows = parts.apart(n, v)
    within = chunks.documents(starts := parts.document_starts(n, rows, segments_BT))
    if backend != "xla":
        return _by_kernels(backend, n, rows, within, chunks.numbers(starts), state, *(
            parts.apart(n, x) for x in (q, k, v, g.astype(F32), beta.astype(F32))))
    q, k, v, g, beta = (chunks.cut(parts.apart(n, x.astype(F32))) for x in (
        *(jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q, k)), v, g, beta[..., None]))
    g = g * within.inside
    qk, kk = products(q, k, g)
    decayed = chunks.since_start(g) * within.from_before
    # What the tokens would write to an empty state, and what they read of the one before the chunk.
    new, read = unit_triangular.solve(beta * kk * within.pairs, (beta * v, beta * k * decayed))
    write = k * chunks.until_end(g) * within.to_end
    maps = chunk_states.ChunkMaps(chunks.whole(g) * within.through,
                                  jnp.einsum("...ck,...cv->...kv", write, new), read, write)
    begins, last = chunk_states.states(n, maps, state)
    qk = qk * within.pairs
    y = (q * decayed - qk @ read) @ begins + qk @ new
    return parts.together(n, chunks.join(y, rows.shape[1])).astype(rows.dtype), last


def _by_kernels(backend, n, rows, within, documents, state, q, k, v, g, beta):
    """Return the same by the kernels of what is within chunks."""
    q, k, v, g, beta = (chunks.cut(x) for x in (q, k, v, g, beta[..., None]))
    g = g * within.inside
    wide = g.swapaxes(3, 4) if g.shape[-1] == 1 else g
    given = k, v, wide, beta.swapaxes(3, 4), documents
    added, read, write, solved = by_chunk(delta_kernels.MAPS, backend, v.shape[2], *given)
    maps = chunk_states.ChunkMaps(chunks.whole(g) * within.through, added, read, write)
    begins, last = chunk_states.states(n, maps, state)
    y, = by_chunk(delta_kernels.OUTPUTS, backend, v.shape[2], q, *given, solved, begins)
    return parts.together(n, chunks.join(y, rows.shape[1])), last


def gated_delta_step(q_B1GK: jax.Array, k_B1GK: jax.Array, v_B1HV: jax.Array, g_B1H: jax.Array, beta_B1H: jax.Array,
                     state_BHKV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `gated_delta_rule` of one token a row, and the state after it."""
    return delta_step(q_B1GK, k_B1GK, v_B1HV, g_B1H[..., None], beta_B1H, state_BHKV)


def delta_step(q_B1GK, k_B1GK, v_B1HV, g_B1HX, beta_B1H, state_BHKV) -> tuple[jax.Array, jax.Array]:
    """Return `delta_rule` of one token a row, and the state after it."""
    q_B1GK, k_B1GK = (parts.for_all_heads(x, v_B1HV.shape[2]) for x in (q_B1GK, k_B1GK))
    by_head, heads = ("batch", None, "act_heads", None), ("batch", None, "act_heads")
    return parts.on_own_rows(_step, (*(by_head,) * 4, heads, parts.STATE), (by_head, parts.STATE))(
        q_B1GK, k_B1GK, v_B1HV, g_B1HX, beta_B1H, state_BHKV)


@partial(jax.jit, static_argnums=0, inline=True)
def _step(n, q, k, v, g, beta, state):
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    q, k, value, g, beta = (x[:, 0].astype(F32) for x in (q, k, v, g, beta))
    state = jnp.exp(g)[..., None] * state.astype(F32)
    error = value - jnp.einsum("bhk,bhkv->bhv", k, state)
    state += (beta[..., None] * k)[..., None] * error[:, :, None]
    return jnp.einsum("bhk,bhkv->bhv", q, state)[:, None].astype(v.dtype), state
