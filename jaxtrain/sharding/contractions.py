"""A product of activations and weights as an einsum by logical names; and arrays in floats of 8 bits with one scale.

products.py computes products in the precision of the step with these; block_products.py does in blocks with scales.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxtrain.base.annotations import AnyArray
from jaxtrain.sharding import activations
from jaxtrain.sharding.axis_rules import Names

Product = Callable[[jax.Array, jax.Array], jax.Array]  # input, weight -> output; linear in each of them


@dataclass(frozen=True)
class Contraction:
    """An einsum of an input [rows, tokens, ...] and a weight, by the logical names of the weight and the result."""

    equation: str
    names: Names
    out: Names

    def __call__(self, x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        """Return input times weight, plus bias."""
        return activations.einsum(self.equation, x, weight, self.names, self.out, bias)


FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
_LEAST = 1e-30  # scale, also of zeros


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rounded:
    """An array in 8 bits, or its gradient, which has no scale."""

    values: jax.Array
    scale: AnyArray  # to multiply them with
    dtype: DTypeLike = field(metadata={"static": True})  # of the array

    @classmethod
    def of(cls, x: jax.Array, dtype: DTypeLike) -> "Rounded":
        """Round an array so that its largest magnitude becomes the largest number of `dtype`."""
        spec = jax.typeof(x).sharding.spec
        if spec.reduced:  # it describes only the gradient, and operations reject it
            x = jax.reshard(x, P(*spec.partitions))
        # XLA would hand over the float32 that `x` was cast from: another number, and an array of twice the size.
        x = jax.lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, jnp.finfo(x.dtype).nmant)
        most = float(jnp.finfo(dtype).max)
        scale = checkpoint_name(jnp.maximum(activations.peak(x).astype(jnp.float32) / most, _LEAST), "dots")
        # A quotient above `most` by a rounding error would become infinite or NaN.
        return cls(jnp.clip(x.astype(jnp.float32) / scale, -most, most).astype(dtype), scale, x.dtype)

    @property
    def wide(self) -> jax.Array:
        """The same values in the array's own dtype."""
        return self.values.astype(self.dtype)

    @property
    def narrow(self) -> "Rounded":
        """The same with values of 8 bits, if they are e4m3 in the array's own dtype."""
        return replace(self, values=self.values.astype(FORWARD))


def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and layout of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.typeof(x).sharding)


def exact_sums() -> contextlib.AbstractContextManager[None]:
    """Turn off cuBLASLt's fast accumulation, which adds products in fp8 with fewer bits than float32."""
    return jax.default_matmul_precision("highest")


def transposed(linear: Callable, x: jax.Array | jax.ShapeDtypeStruct, dy: jax.Array) -> jax.Array:
    """Return the gradient of a linear function with respect to its argument, of which only the shape is read."""
    return jax.linear_transpose(linear, x)(dy)[0]


def scaled(y: jax.Array, one: Rounded, other: Rounded) -> jax.Array:
    """Return the product of two arrays from that of their values in 8 bits."""
    scale, unreduced = one.scale * other.scale, jax.typeof(y).sharding.spec.unreduced
    if unreduced:
        scale = jax.reshard(scale, P(reduced=unreduced))
    return (y.astype(jnp.float32) * scale).astype(y.dtype)  # a scale rounded to bfloat16 would bias the whole product
