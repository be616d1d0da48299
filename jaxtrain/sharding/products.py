"""Products of activations and weights in the precision of the step: as they are, or in 8-bit floats (fp8).

With fp8, a product rounds each of its two factors to a float of 8 bits, with one scale for the whole array, chosen so
that its largest magnitude just fits (current scaling): activations and weights to e4m3, gradients of outputs to e5m2,
which has more range. Results are bfloat16. The maximum is that of the array on all devices, so the roundings do not
depend on the mesh.

The factors reach the product as bfloat16 values that 8 bits hold exactly. XLA multiplies them in fp8 where the hardware
can; elsewhere bfloat16 products of the same values are computed, so that fp8 can be tried and tested on any device.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxtrain.sharding import activations

Product = Callable[[jax.Array, jax.Array], jax.Array]  # input, weight -> output; linear in each of them
FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
_LEAST = 1e-30  # scale, also of zeros

_fp8 = contextvars.ContextVar("jaxtrain_fp8", default=False)


@contextlib.contextmanager
def in_fp8(on: bool) -> Iterator[None]:
    """Trace the products in this block in fp8, or as they are."""
    token = _fp8.set(on)
    try:
        yield
    finally:
        _fp8.reset(token)


def is_fp8() -> bool:
    """Return whether products are traced in fp8."""
    return _fp8.get()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rounded:
    """An array in 8 bits, or its gradient, which has no scale."""

    values: jax.Array
    scale: Any  # to multiply them with
    dtype: Any = field(metadata={"static": True})  # of the array

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


Factor = jax.Array | Rounded


def multiply(product: Product, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return `product(x, weight)` in fp8, with gradients that are computed in fp8 too."""
    @jax.custom_vjp
    def apply(x, weight):
        return output(x, weight)[0]

    def output(x, weight):
        x, weight = Rounded.of(x, FORWARD), Rounded.of(weight, FORWARD)
        return scaled(product(x.wide, weight.wide), x, weight), (x, weight)

    def backward(saved, dy):
        x, weight = saved
        dy = Rounded.of(dy, BACKWARD)
        return _input_gradient(product, kind, weight, dy), _weight_gradient(product, x, weight.wide, dy)

    kind = _abstract(x)
    apply.defvjp(output, backward)
    return apply(x, weight)


def sent(x: jax.Array, send: Callable[[jax.Array], jax.Array] = lambda x: x) -> tuple[jax.Array, jax.Array]:
    """Return the values of an array in e4m3 after `send`, a linear function that moves them, and their scale.

    The values have the array's dtype, so that they have a gradient: that of what was sent, as if nothing were rounded.
    """
    @jax.custom_vjp
    def apply(x):
        rounded = Rounded.of(x, FORWARD)
        return send(rounded.values).astype(x.dtype), rounded.scale

    kind = _abstract(x)
    apply.defvjp(lambda x: (apply(x), None), lambda _, d: (_transposed(send, kind, d[0]),))
    return apply(x)


def rounded(x: Factor, dtype: DTypeLike) -> Rounded:
    """Return an array in 8 bits; it may be already."""
    return x if isinstance(x, Rounded) else Rounded.of(x, dtype)


def plain(x: Factor) -> jax.Array:
    """Return an array in its own dtype again, as it was rounded."""
    return (x.wide.astype(jnp.float32) * x.scale).astype(x.dtype) if isinstance(x, Rounded) else x


def of_values(f: Callable[[jax.Array], jax.Array], x: Factor) -> Factor:
    """Return `f(x)`, or of an array in 8 bits the same with `f` of its values."""
    return replace(x, values=f(x.values)) if isinstance(x, Rounded) else f(x)


def gradient_of(x: Factor, dx: jax.Array) -> Factor:
    """Return the gradient of an array as a tree like it, which may be in 8 bits."""
    return replace(x, values=dx, scale=None) if isinstance(x, Rounded) else dx


def multiply_at_rest(product: Product, x: jax.Array, wide: Callable[..., jax.Array], *at_rest: jax.Array) -> jax.Array:
    """Return `product(x, wide(*at_rest))`, for a frozen weight that is computed from other arrays.

    Only those are kept for the backward pass, which computes the weight again.
    """
    @jax.custom_vjp
    def apply(x, *at_rest):
        return product(x, wide(*at_rest))

    def backward(at_rest, dy):
        return _transposed(lambda x: product(x, wide(*at_rest)), kind, dy), *(None for _ in at_rest)

    kind = _abstract(x)
    apply.defvjp(lambda x, *at_rest: (apply(x, *at_rest), at_rest), backward)
    return apply(x, *at_rest)


def forward(product: Product, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the output of a product whose gradients are computed by the next two functions."""
    return multiply(product, x, weight) if is_fp8() else product(x, weight)


def input_gradient(product: Product, x: jax.Array | jax.ShapeDtypeStruct, weight: jax.Array,
                   dy: jax.Array) -> jax.Array:
    """Return the gradient with respect to the input alone, from that of the output; `x` may be abstract."""
    if not is_fp8():
        return _transposed(lambda x: product(x, weight), x, dy)
    return _input_gradient(product, x, Rounded.of(weight, FORWARD), Rounded.of(dy, BACKWARD))


def weight_gradient(product: Product, x: jax.Array, weight: jax.Array | jax.ShapeDtypeStruct,
                    dy: jax.Array) -> jax.Array:
    """Return the gradient with respect to the weight alone, from that of the output; `weight` may be abstract."""
    if not is_fp8():
        return _transposed(lambda weight: product(x, weight), weight, dy)
    return _weight_gradient(product, Rounded.of(x, FORWARD), weight, Rounded.of(dy, BACKWARD))


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.typeof(x).sharding)


def _input_gradient(product: Product, x: jax.Array | jax.ShapeDtypeStruct, weight: Rounded, dy: Rounded) -> jax.Array:
    with _exact_sums():
        return scaled(_transposed(lambda x: product(x, weight.wide), x, dy.wide), weight, dy)


def _weight_gradient(product: Product, x: Rounded, weight: jax.Array | jax.ShapeDtypeStruct, dy: Rounded) -> jax.Array:
    with _exact_sums():
        return scaled(_transposed(lambda weight: product(x.wide, weight), weight, dy.wide), x, dy)


def _exact_sums():
    """Turn off cuBLASLt's fast accumulation, which adds products in fp8 with fewer bits than float32."""
    return jax.default_matmul_precision("highest")


def _transposed(linear: Callable, x: jax.Array | jax.ShapeDtypeStruct, dy: jax.Array) -> jax.Array:
    return jax.linear_transpose(linear, x)(dy)[0]


def scaled(y: jax.Array, one: Rounded, other: Rounded) -> jax.Array:
    """Return the product of two arrays from that of their values in 8 bits."""
    scale, unreduced = one.scale * other.scale, jax.typeof(y).sharding.spec.unreduced
    if unreduced:
        scale = jax.reshard(scale, P(reduced=unreduced))
    return (y.astype(jnp.float32) * scale).astype(y.dtype)  # a scale rounded to bfloat16 would bias the whole product
