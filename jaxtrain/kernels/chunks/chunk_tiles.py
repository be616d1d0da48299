"""Functions of chunks in tiles, as Pallas kernels that Triton compiles, for NVIDIA GPUs since compute capability 8.0.

One call for each chunk of tokens and each head, as in chunk_kernels.py. There a kernel holds whole matrices; here it is
given references to them, of which it loads tiles, since the registers of a GPU hold few matrices of 64 x 64. On CPUs
Pallas interprets the kernels.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxtrain.base.annotations import AnyArray, PyTree
from jaxtrain.kernels.chunks.chunk_matrices import Result, products

TILE = 32  # channels of a tile
LEAST = 16  # sides that tensor cores multiply
WARPS = 8


def by_tiles(width: int, body: Callable[[AnyArray, PyTree], PyTree], start: PyTree = None) -> PyTree:
    """Return what `body(channels, carried)` returns for the last tile of so many channels, of the first for `start`."""
    side = min(TILE, width)
    return lax.fori_loop(0, width // side, lambda index, carried: body(pl.ds(index * side, side), carried), start)


def call(kernel: Callable[..., None], results: Sequence[Result], name: str, heads: int, arrays: Sequence[jax.Array],
         interpret: bool) -> list[jax.Array]:
    """Return the results of a kernel for all chunks and heads, of arrays [N, B, H, rows, columns], or of groups.

    Rows and columns are padded with zeros to whole tiles, which must not change the other results. The FLOP of all
    calls are in the name of the kernel, so that a compiled program tells them.
    """
    arrays = [_padded(x) for x in arrays]
    grid = *arrays[0].shape[:2], heads
    outs = [jax.ShapeDtypeStruct((*grid, *sides[:-2], *map(_side, sides[-2:])), dtype) for sides, dtype in results]

    def block(x):
        shared = heads // x.shape[2]
        return pl.BlockSpec((None, None, None, *x.shape[3:]),
                            lambda n, b, h: (n, b, lax.div(h, shared), *[0] * (x.ndim - 3)))

    def made(**told):
        return pl.pallas_call(kernel, grid=grid, in_specs=[block(x) for x in arrays],
                              out_specs=[block(x) for x in outs], out_shape=outs, interpret=interpret,
                              compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1), **told)

    inside = jax.make_jaxpr(made())(*arrays).eqns[-1].params["jaxpr"]
    flops = math.prod(grid) * products(inside)
    name = f"{name}_{flops}_flop"
    cost = pl.CostEstimate(flops=flops, transcendentals=0,
                           bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays, *outs)))
    found = jax.named_scope(name)(made(name=name, cost_estimate=cost))(*arrays)
    return [x[..., :rows, :columns] for x, ((*_, rows, columns), _) in zip(found, results, strict=True)]


def _side(size: int) -> int:
    return size if size == 1 else max(LEAST, 1 << (size - 1).bit_length()) if size < TILE else -(-size // TILE) * TILE


def _padded(x: jax.Array) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, _side(size) - size) for size in x.shape[-2:]])
