"""Tiles of scores: what the kernels of `triton_attention` have in common."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxtrain.base.annotations import AnyArray

LOG2E = math.log2(math.e)


class Tiles(NamedTuple):
    """The sides of a tile, and the threads that compute it: as much as registers and 99 KiB of shared memory hold."""

    queries: int
    keys: int
    warps: int
    stages: int  # of tiles that are loaded ahead

    def at_query(self, begin: AnyArray) -> AnyArray:
        """Return where the queries from this one on are."""
        return pl.ds(begin, self.queries)

    def at_key(self, begin: AnyArray) -> AnyArray:
        """Return where the keys from this one on are."""
        return pl.ds(begin, self.keys)


def kernel(body: Callable[..., None], results: jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...],
           grid: tuple[int, int, int], tiles: Tiles, name: str, interpret: bool) -> Callable[..., AnyArray]:
    """Return the kernel of a body, which is told of which block, row and head it is; blocks come in order."""
    _, rows, heads = grid

    def program(*refs):
        number = pl.program_id(0)
        block, inside = lax.div(number, jnp.int32(rows * heads)), lax.rem(number, jnp.int32(rows * heads))
        body(*refs, block, lax.div(inside, jnp.int32(heads)), lax.rem(inside, jnp.int32(heads)))

    call = pl.pallas_call(program, out_shape=results, grid=(math.prod(grid),), name=name, interpret=interpret,
                          compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages))
    return jax.named_scope(name)(call)  # compiled programs have Triton's kernels without their names


def load(ref: AnyArray, *place: AnyArray) -> jax.Array:
    """Return a part of an array."""
    return triton.load(ref.at[_with_all(ref, place)])


def store(ref: AnyArray, *place: AnyArray, values: jax.Array) -> None:
    """Write a part of an array."""
    triton.store(ref.at[_with_all(ref, place)], values.astype(ref.dtype))


def _with_all(ref: AnyArray, place: tuple[AnyArray, ...]) -> tuple[AnyArray, ...]:
    numbers = (jnp.int32(one) if isinstance(one, int) else one for one in place)
    return (*numbers, *(slice(None),) * (len(ref.shape) - len(place)))


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return their product in float32, to which float32 is not rounded before (TF32)."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def sees(first: jax.Array, last: jax.Array, at: AnyArray, count: int) -> jax.Array:
    """Return which of so many tokens from `at` on lie between the first and the last of each row."""
    token = at + jnp.arange(count)[None]
    return (token >= first[:, None]) & (token <= last[:, None])


def log2_scores(products: jax.Array, scale: float, soft_cap: float) -> jax.Array:
    """Scale and cap scores, and return them to base 2, for which there is an instruction."""
    if soft_cap:
        return jnp.tanh(products * (scale / soft_cap)) * (soft_cap * LOG2E)
    return products * (scale * LOG2E)


def slope(weights: jax.Array, scores_log2: jax.Array, soft_cap: float) -> jax.Array:
    """Return weights times the derivative of capped scores by those before."""
    if not soft_cap:
        return weights
    tanh = scores_log2 * (1 / (soft_cap * LOG2E))
    return weights * (1.0 - tanh * tanh)
