"""Kernels for what is within a chunk of the state space model of Mamba-2, of state_space.py.

`maps` returns what a chunk adds to the state before it, `outputs` the results of its tokens, given that state. A call
is for a group of heads, which share B and C: their gradients are summed on the chip.

Shape suffixes: R heads of a group, C tokens of a chunk, N width of the state, P width of a head. Logarithms of decays g
and steps dt are [R, 1, C].
"""

from functools import partial

import jax.numpy as jnp

from jaxtrain.kernels.chunks.chunk_kernels import Chunks
from jaxtrain.kernels.chunks.chunk_matrices import F32, column, product, tokens
from jaxtrain.models.recurrent.kernels.delta_kernels import (
    decay_between,
    decay_since_start,
    decay_until_end,
    within_documents,
)


def _maps(B_CN, x_RCP, g, dt, documents_1C):
    B_CN = B_CN.astype(F32)
    return jnp.stack([product(B_CN * decay_until_end(g[r], documents_1C), column(dt[r]) * x_RCP[r].astype(F32), "00")
                      for r in range(len(x_RCP))]),


def _outputs(C_CN, B_CN, x_RCP, g, dt, documents_1C, state_RNP):
    C_CN, B_CN = C_CN.astype(F32), B_CN.astype(F32)
    i, j = tokens(len(C_CN))
    pairs_CC = jnp.where((i >= j) & within_documents(documents_1C), product(C_CN, B_CN, "11"), 0)

    def of_head(r):
        read_CP = product(C_CN * decay_since_start(g[r], documents_1C), state_RNP[r])
        return read_CP + product(pairs_CC * decay_between(g[r]), column(dt[r]) * x_RCP[r].astype(F32))

    return jnp.stack([of_head(r) for r in range(len(x_RCP))]),


def _maps_results(B, x, *_):
    (R, _, P), N = x.shape[3:], B.shape[-1]
    return ((R, N, P), F32),


def _outputs_results(C, B, x, *_):
    return (x.shape[3:], x.dtype),


def _tiles(name):
    from jaxtrain.models.recurrent.kernels import state_space_tiles  # only where GPUs run it

    return getattr(state_space_tiles, name), getattr(state_space_tiles, f"{name}_gradients")


MAPS = Chunks(_maps, _maps_results, "space_maps", tiled=partial(_tiles, "maps"))
OUTPUTS = Chunks(_outputs, _outputs_results, "space_outputs", tiled=partial(_tiles, "outputs"))
