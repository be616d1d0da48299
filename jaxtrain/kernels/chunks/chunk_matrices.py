"""Products, inverses and sums of the matrices of a chunk, of which its kernels are made, and their FLOP."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr
from jax.typing import DTypeLike

from jaxtrain.sharding import mesh_context

F32 = jnp.float32
GPUS = ("gpu", "cuda")
PASSES = 6  # products of bfloat16 that make one of float32 on TPUs
TF32_PASSES = 3  # products of TF32 that make one of float32 on GPUs
X3 = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
Result = tuple[tuple[int, ...], DTypeLike]  # the sides and the dtype of what a kernel returns


def products(jaxpr: Jaxpr) -> int:
    """Return the FLOP of the products of matrices in a program; those of exact ones as often as devices multiply."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left, out = eqn.invars[0].aval, eqn.outvars[0].aval
            assert isinstance(left, jax.core.ShapedArray) and isinstance(out, jax.core.ShapedArray)
            depth = math.prod(left.shape[i] for i in contracted)
            precision = eqn.params["precision"]
            passes = TF32_PASSES if precision is X3 else PASSES if precision else 1
            total += 2 * passes * depth * math.prod(out.shape)
        for inner in filter(None, (eqn.params.get("jaxpr"), eqn.params.get("call_jaxpr"))):
            total += eqn.params.get("length", 1) * products(getattr(inner, "jaxpr", inner))
    return total


def product(a: jax.Array, b: jax.Array, contracted: str = "10", *, exact: bool = False) -> jax.Array:
    """Return the product of two matrices in float32, over a dimension of each; `exact`: their elements as they are.

    All others are rounded as the device rounds products of float32.
    """
    dimensions = (((int(contracted[0]),), (int(contracted[1]),)), ((), ()))
    precision = (X3 if mesh_context.platform() in GPUS else lax.Precision.HIGHEST) if exact else None
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=F32)


def tokens(size: int) -> tuple[jax.Array, jax.Array]:
    """Return the numbers of the tokens of each pair [C, C]: of its row, and of its column."""
    i, j = (lax.broadcasted_iota(jnp.int32, (size, size), side) for side in (0, 1))
    return i, j


def column(row_1C: jax.Array) -> jax.Array:
    """Return a row [1, C] as a column [C, 1], by a sum: kernels cannot transpose numbers this narrow."""
    i, j = tokens(row_1C.shape[1])
    return jnp.where(i == j, row_1C, 0).sum(1, keepdims=True)


def row(column_C1: jax.Array) -> jax.Array:
    """Return a column [C, 1] as a row [1, C]."""
    i, j = tokens(len(column_C1))
    return jnp.where(i == j, column_C1, 0).sum(0, keepdims=True)


def inverse(a: jax.Array) -> jax.Array:
    """Return the inverse of 1 + L, where L [C, C] is `a` below its diagonal; C is a power of 2.

    As in models/recurrent/unit_triangular.py, but by masks, as kernels cannot cut matrices.
    """
    i, j = tokens(len(a))

    def joined(level, found):
        off = (i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level)
        return found - product(product(found, jnp.where(off, a, 0), exact=True), found, exact=True)

    return lax.fori_loop(0, len(a).bit_length() - 1, joined, jnp.where(i == j, 1, 0).astype(F32))


@jax.custom_vjp
def known_inverse(a: jax.Array, found: jax.Array) -> jax.Array:
    """Return `found`, which is `inverse(a)`, with its gradient."""
    return found


def _known_backward(found, gradient):
    i, j = tokens(len(found))
    return jnp.where(i > j, -product(product(found, gradient, "00"), found, "11"), 0), None


known_inverse.defvjp(lambda a, found: (found, found), _known_backward)
