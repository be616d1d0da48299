"""Tiles of scores in the registers of a group of warps: what the kernels of `mosaic_attention` have in common.

Shape suffixes: Q queries and S keys of a tile.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu
from jax.typing import DTypeLike

HEIGHT = 64  # rows of a tile: of one product of the tensor cores
COMPUTING = 2  # groups of warps of a block of threads that compute, each on rows of its own; one more copies
LOG2E = math.log2(math.e)
TILE = gpu.Layout.WGMMA  # how a group's registers hold a tile, and one number for each of its rows or columns
ROWS, COLUMNS = TILE.reduce(1), TILE.reduce(0)


def scores_to_log2(scores: jax.Array, scale: float, soft_cap: float) -> jax.Array:
    """Scale and cap scores, and return them to base 2, for which there is an instruction."""
    if soft_cap:
        return jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2E)
    return scores * (scale * LOG2E)


def visible(begin: jax.Array, at: jax.Array, first_Q: jax.Array, last_Q: jax.Array | None,
            tile: tuple[int, int]) -> jax.Array:
    """Return which keys from `at` on the queries from `begin` on see: from `first` to `last`, None: to the query."""
    keys = at + gpu.broadcasted_iota(jnp.int32, tile, 1, layout=TILE)
    last = begin + gpu.broadcasted_iota(jnp.int32, tile, 0, layout=TILE) if last_Q is None else across(last_Q, tile)
    return (keys <= last) & (keys >= across(first_Q, tile))


def load(ref: jax.Ref, layout: Any, optimized: bool = True) -> jax.Array:
    """Return what a reference to memory holds; from that of the device as a whole, only `optimized=False` can."""
    read: Any = gpu.load  # of which JAX 0.10, without these kernels, had other arguments
    return read(ref, layout=layout, optimized=optimized)


def product(a: jax.Ref | jax.Array, b: jax.Ref, shape: tuple[int, int], *staged: jax.Ref) -> jax.Array:
    """Return the product of two matrices, see `multiply`."""
    def compute(total):
        multiply(total, a, b, *staged)
        return total[...]
    return pl.run_scoped(compute, gpu.ACC(shape))


def added(total: jax.Array, a: jax.Array, b: jax.Ref, *staged: jax.Ref) -> jax.Array:
    """Return a sum in registers, to which the product of two matrices is added in the same registers."""
    begun: Any = gpu.ACC.init(total)
    return pl.run_state(lambda accumulator: multiply(accumulator, a, b, *staged))(begun)


def multiply(total: Any, a: jax.Ref | jax.Array, b: jax.Ref, *staged: jax.Ref) -> None:
    """Begin to add the product of two matrices in shared memory to an accumulator; `a` may be in registers.

    The interpreter takes none from registers: it has shared memory for `a`.
    """
    for ref in staged:
        ref[...], a = a, ref
        gpu.commit_smem()
    gpu.wgmma(total, a, b)


def staging(shape: tuple[int, ...], dtype: DTypeLike, interpret: Any) -> list[Any]:
    """Return the shared memory that the interpreter needs for `multiply`."""
    return [gpu.SMEM((COMPUTING, *shape), dtype)] if interpret else []


def hidden(number: jax.Array) -> jax.Array:
    """Return the same number, of which the compiler does not know that it is the same in each step of a loop.

    Addresses that depend on it are then computed in each step, and do not fill registers all the time.
    """
    return lax.optimization_barrier(number)


def feed(steps: jax.Array, copies: Callable[[jax.Array], Iterable[tuple]], *used: tuple[jax.Ref, int]) -> None:
    """Copy the tiles of each step to the next place in shared memory, and wait until all of them were used.

    copies: a step -> for each kind of tiles the barriers that tell that one came, and pairs: what to copy, and all
    places for it.
    used: for each kind of tiles the barriers that tell that the one in a place was used, and how many places there are.
    """
    def send(i, _):
        for (done, stages), (came, *pairs) in zip(used, copies(i), strict=True):
            slot = lax.rem(i, jnp.int32(stages))
            pl.when(i >= stages)(partial(gpu.barrier_wait, done.at[slot]))
            for given, places in pairs:
                gpu.copy_gmem_to_smem(given, places.at[slot], came.at[slot])

    lax.fori_loop(0, steps, send, None)
    for done, stages in used:
        for slot in range(stages):
            pl.when(slot < steps)(partial(gpu.barrier_wait, done.at[slot]))


def across(numbers: jax.Array, tile: tuple[int, int], dimension: int = 0) -> jax.Array:
    """Broadcast a number for each row (dimension 0) or column of a tile."""
    return lax.broadcast_in_dim(numbers, tile, [dimension])


def filled(value: float, shape: tuple[int, ...], layout: Any = TILE) -> jax.Array:
    """Return registers with one value."""
    return gpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def swizzled(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Return tiles in shared memory as the tensor cores read them: rows of 128 bytes, eight of them permuted."""
    width = 128 // jnp.dtype(dtype).itemsize
    return gpu.SMEM(shape, dtype, transforms=(gpu.TilingTransform((8, width)), gpu.SwizzleTransform(128)))
