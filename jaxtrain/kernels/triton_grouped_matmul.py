"""Grouped matmuls as Pallas kernels that Triton compiles, for NVIDIA GPUs since compute capability 8.0.

They serve A100, L40S, RTX and Blackwell, where `lax.ragged_dot` multiplies every row by the matrices of all groups:
here the tiles of a group's rows are multiplied by its own matrix, and tiles without rows by none. Rows, widths and
bounds of groups may be any numbers. On CPUs Pallas interprets the kernels.

Shape suffixes: R rows, G groups, K and N the dimensions of a weight, S tiles of rows of one group each.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from jaxtrain.base.annotations import AnyArray
from jaxtrain.kernels.row_tiles import row_tiles

TILE = 128  # rows and columns of a tile of a result
DEPTH = 64  # of the contracted dimension in one step
TOGETHER = 8  # tiles of rows that are computed before the next columns, for the L2 cache
WARPS, STAGES = 8, 3  # three stages of two operands are 96 KiB, which L40S and RTX have for a block of threads


def product(rows_RK: jax.Array, weights: jax.Array, sizes_G: jax.Array, *, transposed: bool = False, name: str,
            dtype: DTypeLike | None = None, interpret: bool = False) -> jax.Array:
    """Return each row times the weight [G, K, N] of its group, and zeros behind the last group.

    transposed: weights are [G, N, K].
    dtype: of the result, if it is not that of the rows.
    name: of the kernel, in profiles and in compiled programs.
    interpret: whether Pallas's interpreter runs it, without a GPU.
    """
    (R, K), G, N = rows_RK.shape, sizes_G.size, weights.shape[1 if transposed else 2]
    tiles_3S = row_tiles(sizes_G, R, TILE)
    tiles_3S = jnp.pad(tiles_3S, ((0, 0), (0, -tiles_3S.shape[1] % TOGETHER)))  # with empty ones
    wide, deep = -(-N // TILE), -(-K // DEPTH)

    def kernel(tiles, rows, weights, out):
        band, inside = _divided(pl.program_id(0), TOGETHER * wide)
        column, tile = _divided(inside, TOGETHER)
        tile = band * TOGETHER + tile
        group, begin, end = tiles[0, tile], tiles[1, tile], tiles[2, tile]
        at, columns = lax.div(begin, jnp.int32(TILE)) * TILE, pl.ds(column * TILE, TILE)
        matrix = lax.min(group, jnp.int32(G - 1))

        def step(index, total):
            depth = pl.ds(index * DEPTH, DEPTH)
            a = _loaded(rows, pl.ds(at, TILE), depth)
            b = _loaded(weights, matrix, *((columns, depth) if transposed else (depth, columns)))
            return total + _dot(a, b.T if transposed else b)

        steps = jnp.where((group < G) & (begin < end), jnp.int32(deep), jnp.int32(0))
        total = lax.fori_loop(0, steps, step, jnp.zeros((TILE, TILE), jnp.float32))
        place = at + jnp.arange(TILE)
        mine = ((place >= begin) & (place < end))[:, None]
        _store(out, pl.ds(at, TILE), columns, values=total, mask=mine)

    result = jax.ShapeDtypeStruct((R, N), dtype or rows_RK.dtype)
    return _kernel(kernel, result, tiles_3S.shape[1] * wide, name, interpret)(tiles_3S, rows_RK, weights)


def products_of_groups(rows: jax.Array, others: jax.Array, sizes_G: jax.Array, *, transposed: bool = False, name: str,
                       dtype: DTypeLike | None = None, interpret: bool = False) -> jax.Array:
    """Return the product of the rows [R, K] of each group, transposed, and the other rows [R, N] of it: [G, K, N]."""
    assert not transposed, "only 8-bit floats are turned, which these kernels do not multiply"
    (_, K), (_, N), G = rows.shape, others.shape, sizes_G.size
    ends_G = jnp.cumsum(sizes_G.astype(jnp.int32))
    bounds_2G = jnp.stack([ends_G - sizes_G.astype(jnp.int32), ends_G])
    tall, wide = -(-K // TILE), -(-N // TILE)

    def kernel(bounds, rows, others, out):
        group, inside = _divided(pl.program_id(0), tall * wide)
        row, column = _divided(inside, wide)
        begin, end = bounds[0, group], bounds[1, group]
        first = lax.div(begin, jnp.int32(DEPTH))

        def step(index, total):
            at = (first + index) * DEPTH
            place = at + jnp.arange(DEPTH)
            mine = ((place >= begin) & (place < end))[:, None]  # what others have there may be anything
            a, b = (_loaded(x, pl.ds(at, DEPTH), pl.ds(tile * TILE, TILE), mask=mine)
                    for x, tile in ((rows, row), (others, column)))
            return total + _dot(a.T, b)

        steps = jnp.where(begin < end, lax.div(end - 1, jnp.int32(DEPTH)) - first + 1, jnp.int32(0))
        total = lax.fori_loop(0, steps, step, jnp.zeros((TILE, TILE), jnp.float32))
        _store(out, group, pl.ds(row * TILE, TILE), pl.ds(column * TILE, TILE), values=total)

    result = jax.ShapeDtypeStruct((G, K, N), dtype or rows.dtype)
    return _kernel(kernel, result, G * tall * wide, name, interpret)(bounds_2G, rows, others)


def _divided(number: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return their product in float32, to which float32 is not rounded before (TF32)."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _inside(shape: tuple[int, ...], place: tuple[AnyArray, ...], mask: jax.Array | None) -> jax.Array | None:
    """Return which elements of a block lie in the array, and in `mask`; None: all of them."""
    blocks = place[-2:]
    for axis, (size, block) in enumerate(zip(shape[-2:], blocks, strict=True)):
        if size % block.size:
            here = jnp.expand_dims(block.start + jnp.arange(block.size) < size, 1 - axis)
            mask = here if mask is None else mask & here
    return None if mask is None else jnp.broadcast_to(mask, tuple(block.size for block in blocks))


def _loaded(ref: AnyArray, *place: AnyArray, mask: jax.Array | None = None) -> jax.Array:
    """Return a block of an array, with zeros outside of it and of `mask`."""
    mask = _inside(ref.shape, place, mask)
    return triton.load(ref.at[place], mask=mask, other=None if mask is None else 0.0)


def _store(ref: AnyArray, *place: AnyArray, values: jax.Array, mask: jax.Array | None = None) -> None:
    triton.store(ref.at[place], values.astype(ref.dtype), mask=_inside(ref.shape, place, mask))


def _kernel(body: Callable[..., None], result: jax.ShapeDtypeStruct, programs: int, name: str,
            interpret: bool) -> Callable[..., jax.Array]:
    call = pl.pallas_call(body, out_shape=result, grid=(programs,), name=name, interpret=interpret,
                          compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES))
    return jax.named_scope(name)(call)  # compiled programs have Triton's kernels without their names
