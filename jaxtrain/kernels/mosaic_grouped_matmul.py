"""Grouped matmuls as Mosaic GPU kernels for NVIDIA GPUs of compute capability 9.0 (H100, H200).

Rows are sorted by group. The rows of a tile of the result belong to one group: where a group begins or ends inside a
block of rows, that block is computed once for each group in it. Blocks that hold no row of any group are not computed.

Each processor takes tile after tile; a ring of buffers in shared memory is filled by asynchronous copies while the
tensor cores work on the previous block.

Shape suffixes: R rows, G groups, K and N the dimensions of a weight, S tiles of the schedule.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu
from jax.typing import DTypeLike

from jaxtrain.kernels.row_tiles import row_tiles

ROWS = 128  # of a tile of the result, and what the number of all rows must be a multiple of
BYTES = 128  # of the contracted dimension in one step: the widest swizzle
STEPS = 4  # buffers in the ring
PROCESSORS = 132  # streaming multiprocessors of H100 SXM and H200; with fewer or more, results are the same
_WIDE = 8  # tiles of the result next to each other that are computed before the next rows, for the L2 cache


def product(rows_RK: jax.Array, weights: jax.Array, sizes_G: jax.Array, *, transposed: bool = False, name: str,
            dtype: DTypeLike | None = None, interpret: Any = None) -> jax.Array:
    """Return each row times the weight [G, K, N] of its group, and zeros behind the last group.

    transposed: weights are [G, N, K]; with 8-bit floats they must be.
    dtype: of the result, if it is not that of the rows.
    name: of the kernel, in profiles and in compiled programs.
    interpret: parameters of Pallas's interpreter, to run it without a GPU.
    """
    (R, K), G, N = rows_RK.shape, sizes_G.size, weights.shape[1 if transposed else 2]
    schedule = row_tiles(sizes_G, R, ROWS)
    width = _width(N)
    depth = BYTES // rows_RK.dtype.itemsize
    grid, steps = (schedule.shape[1], N // width), K // depth
    kept = min(1, steps - 1)  # a buffer is free when the product of the next step has begun

    def body(schedule, rows, weights, out):
        @gpu.nd_loop((grid[0] * grid[1],), collective_axes="sm")
        def _(loop):
            tile, column = gpu.planar_snake(loop.index[0], grid, 1, min(_WIDE, grid[1]))
            group, begin, end = schedule[0, tile], schedule[1, tile], schedule[2, tile]
            block = lax.div(begin, jnp.int32(ROWS))

            def accumulate(total):
                @pl.when((group < G) & (begin < end))
                def _():
                    gpu.emit_pipeline(
                        lambda _, a, b: gpu.wgmma(total, a, _turned(b) if transposed else b),
                        grid=(steps,),
                        in_specs=[
                            gpu.BlockSpec((ROWS, depth), lambda k: (block, k), delay_release=kept),
                            gpu.BlockSpec((width, depth), lambda k: (column, k), delay_release=kept) if transposed else
                            gpu.BlockSpec((depth, width), lambda k: (k, column), delay_release=kept)],
                        max_concurrent_steps=min(STEPS, steps),
                    )(rows, weights.at[lax.min(group, jnp.int32(G - 1))])
                return total[...]

            total = pl.run_scoped(accumulate, gpu.ACC((ROWS, width)))

            @partial(pl.run_scoped, result=gpu.SMEM((ROWS, width), dtype=out.dtype))
            def _(result):
                result[...] = total.astype(out.dtype)
                gpu.commit_smem()
                _write_some(result, out, begin, end - begin, block, pl.ds(column * width, width))
                gpu.wait_smem_to_gmem(0, wait_read_only=True)

    result = jax.ShapeDtypeStruct((R, N), dtype or rows_RK.dtype)
    return _kernel(body, result, name, interpret)(schedule, rows_RK, weights)


def products_of_groups(rows: jax.Array, others: jax.Array, sizes_G: jax.Array, *, transposed: bool = False, name: str,
                       dtype: DTypeLike | None = None, interpret: Any = None) -> jax.Array:
    """Return the product of the rows [R, K] of each group, transposed, and the other rows [R, N] of it: [G, K, N].

    transposed: they are [K, R] and [N, R]; 8-bit floats must be.
    dtype: of the result, if it is not that of the rows.
    """
    (K, R), (N, _) = (a.shape if transposed else a.shape[::-1] for a in (rows, others))
    G = sizes_G.size
    depth = BYTES // rows.dtype.itemsize
    ends_G = jnp.cumsum(sizes_G.astype(jnp.int32))
    bounds = jnp.stack([ends_G - sizes_G.astype(jnp.int32), ends_G])
    tall, width = _width(K), _width(N)
    grid = K // tall, N // width

    def block_of(size, at):
        return gpu.BlockSpec((size, depth) if transposed else (depth, size),
                             lambda i: (at, i) if transposed else (i, at), delay_release=1,
                             transforms=_swizzled(rows.dtype))

    def body(bounds, rows, others, out):
        @gpu.nd_loop((G, grid[0] * grid[1]), collective_axes="sm")
        def _(loop):
            group = loop.index[0]
            row, column = gpu.planar_snake(loop.index[1], grid, 1, min(_WIDE, grid[1]))
            begin, end = bounds[0, group], bounds[1, group]
            first, last = lax.div(begin, jnp.int32(depth)), lax.div(end - 1, jnp.int32(depth))
            present = pl.ds(pl.multiple_of(first * depth, depth), R)  # only its blocks up to the last are read

            def accumulate(total):
                def step(index, a, b):
                    block = first + index[0]

                    @pl.when((block == first) | (block == last))
                    def _():  # these may also hold rows of other groups, and what is not finite behind the last one
                        for x in (a, b):
                            at = block * depth + gpu.layout_cast(
                                lax.broadcasted_iota(jnp.int32, x.shape, int(transposed)), gpu.Layout.WGMMA)
                            values = x[...].astype(jnp.float16) if transposed else x[...]  # 8 bits cannot be selected
                            x[...] = jnp.where((at >= begin) & (at < end), values, jnp.zeros((), values.dtype)).astype(
                                x.dtype)
                        gpu.commit_smem()

                    gpu.wgmma(total, *((a, _turned(b)) if transposed else (_turned(a), b)))

                @pl.when(begin < end)
                def _():
                    gpu.emit_pipeline(
                        step, grid=(last - first + 1,), max_concurrent_steps=STEPS,
                        in_specs=[block_of(tall, row), block_of(width, column)],
                    )(*(a.at[:, present] if transposed else a.at[present, :] for a in (rows, others)))
                return total[...]

            total = pl.run_scoped(accumulate, gpu.ACC((tall, width)))

            @partial(pl.run_scoped, result=gpu.SMEM((tall, width), dtype=out.dtype, transforms=_swizzled(out.dtype)))
            def _(result):
                result[...] = total.astype(out.dtype)
                gpu.commit_smem()
                gpu.copy_smem_to_gmem(result, out.at[group, pl.ds(row * tall, tall), pl.ds(column * width, width)])
                gpu.wait_smem_to_gmem(0, wait_read_only=True)

    return _kernel(body, jax.ShapeDtypeStruct((G, K, N), dtype or rows.dtype), name, interpret)(bounds, rows, others)


def _write_some(result: jax.Ref, out: jax.Ref, begin: jax.Array, count: jax.Array, block: jax.Array,
                columns: pl.Slice | slice) -> None:
    """Copy `count` rows from `begin` on to the output; copies have fixed sizes, so one for each bit of the count."""
    place = begin - block * ROWS
    length = ROWS
    while length:
        @pl.when(count & length != 0)
        def _(place=place, length=length):
            gpu.copy_smem_to_gmem(result.at[pl.ds(place, length)], out.at[pl.ds(block * ROWS + place, length), columns])
        place += count & length
        length //= 2


def _kernel(body: Callable[..., None], result: jax.ShapeDtypeStruct, name: str, interpret: Any) -> Callable[..., Any]:
    return gpu.kernel(
        body, out_type=result, grid=(2 if interpret else PROCESSORS,), grid_names=("sm",), kernel_name=name,
        interpret=interpret,
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Warpgroup))


def _width(size: int) -> int:
    return 128 if size % 128 == 0 else 64


def _swizzled(dtype: DTypeLike) -> tuple[Any, ...]:
    size = jnp.dtype(dtype).itemsize
    swizzle = gpu.find_swizzle(BYTES * 8)
    return gpu.TilingTransform((8, swizzle // size)), gpu.SwizzleTransform(swizzle)


def _turned(ref: Any) -> jax.Ref:
    """Return a view of a block in shared memory with its dimensions exchanged."""
    return ref.transpose((1, 0))
