"""Kernels for what is within a chunk of the delta rule, of gated_delta.py and of kimi_delta.py.

`maps` returns what a chunk does to the state before it, `outputs` the results of its tokens, given that state. Neither
writes a matrix of decays, of keys with keys or of queries with keys to memory, and queries and keys of groups are read
as they are. Between both, chunk_states.py passes the states.

Shape suffixes: C tokens of a chunk, K key width, V value width. Decays g are [1, C] of a head, or [C, K] of channels.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxtrain.kernels.chunks.chunk_kernels import Chunks
from jaxtrain.kernels.chunks.chunk_matrices import F32, column, inverse, known_inverse, product, tokens


def _pairs(x_CK, k_CK, g):
    """Return the product of each token's x with each earlier one's k, or its own, decayed in between."""
    i, j = tokens(len(k_CK))
    if len(g) == 1:
        return product(x_CK, k_CK, "11") * decay_between(g)
    # As chunks.products_by_halves: x decays since the middle of a stretch, and k until it.
    found, size = jnp.where(i == j, (x_CK * k_CK).sum(1, keepdims=True), 0), 1
    while size < len(k_CK):
        half = i // size == j // size
        late, early = (product((half & side).astype(F32), g, exact=True) for side in (j <= i, j > i))
        across = (i // (2 * size) == j // (2 * size)) & (i // size > j // size)
        found += jnp.where(across, product(x_CK * jnp.exp(late), k_CK * jnp.exp(early), "11"), 0)
        size *= 2
    return found


def decay_between(g_1C: jax.Array) -> jax.Array:
    """Return the decays of a head from each token until after a later one; for earlier ones it is 1."""
    i, j = tokens(g_1C.shape[1])
    return jnp.exp(product((i >= j).astype(F32), jnp.where(i > j, column(g_1C), 0), exact=True))


def _sums(g, which):
    """Return the sum of the logarithms of some tokens for each token, [C, 1] or [C, K]."""
    if len(g) == 1:
        return jnp.where(which, g, 0).sum(1, keepdims=True)
    return product(which.astype(F32), g, exact=True)


def decay_since_start(g: jax.Array, documents_1C: jax.Array) -> jax.Array:
    """Return the decay of the state before the chunk until after each token; 0 in later documents."""
    i, j = tokens(documents_1C.shape[1])
    return jnp.exp(_sums(g, j <= i)) * jnp.where(column(documents_1C) == 0, 1, 0)


def decay_until_end(g: jax.Array, documents_1C: jax.Array) -> jax.Array:
    """Return the decay of what each token writes until the end of the chunk; 0 in earlier documents."""
    i, j = tokens(documents_1C.shape[1])
    return jnp.exp(_sums(g, j > i)) * jnp.where(column(documents_1C) == documents_1C.max(), 1, 0)


def within_documents(documents_1C: jax.Array) -> jax.Array:
    """Return which pairs of tokens are of one document."""
    return column(documents_1C) == documents_1C


def _maps(k_CK, v_CV, g, beta_1C, documents_1C, *, known=()):
    k_CK, v_CV, beta_C1 = k_CK.astype(F32), v_CV.astype(F32), column(beta_1C)
    i, j = tokens(len(k_CK))
    kept = jnp.where((i > j) & within_documents(documents_1C), beta_C1 * _pairs(k_CK, k_CK, g), 0)
    solve_CC = known_inverse(kept, *known) if known else inverse(kept)
    write_CK = k_CK * decay_until_end(g, documents_1C)
    added_KV = product(write_CK, product(solve_CC, beta_C1 * v_CV), "00")
    read_CK = product(solve_CC, beta_C1 * decay_since_start(g, documents_1C) * k_CK)
    return added_KV, read_CK, write_CK, solve_CC


def _outputs(q_CK, k_CK, v_CV, g, beta_1C, documents_1C, solve_CC, state_KV):
    q_CK, k_CK, v_CV, beta_C1 = q_CK.astype(F32), k_CK.astype(F32), v_CV.astype(F32), column(beta_1C)
    i, j = tokens(len(k_CK))
    decayed = decay_since_start(g, documents_1C)
    new_CV = product(solve_CC, beta_C1 * v_CV - product(beta_C1 * decayed * k_CK, state_KV))
    seen_CC = jnp.where((i >= j) & within_documents(documents_1C), _pairs(q_CK, k_CK, g), 0)
    return product(q_CK * decayed, state_KV) + product(seen_CC, new_CV),


def _maps_results(k, v, *_):
    (C, K), V = k.shape[3:], v.shape[-1]
    return ((K, V), F32), ((C, K), F32), ((C, K), F32), ((C, C), F32)


def _outputs_results(q, k, v, *_):
    return (v.shape[3:], v.dtype),


def _tiles(name):
    from jaxtrain.models.recurrent.kernels import delta_tiles  # only where GPUs run it

    return getattr(delta_tiles, name), getattr(delta_tiles, f"{name}_gradients")


MAPS = Chunks(_maps, _maps_results, "delta_maps", known=(3,), tiled=partial(_tiles, "maps"))
OUTPUTS = Chunks(_outputs, _outputs_results, "delta_outputs", tiled=partial(_tiles, "outputs"))
