"""Products of activations and weights in the precision of the step: as they are, in 8-bit floats (fp8), or in blocks.

MXFP8 and NVFP4, whose blocks have scales, are in block_products.py. With fp8, a product rounds each of its two factors
to a float of 8 bits, with one scale for the whole array, chosen so that its largest magnitude just fits (current
scaling): activations and weights to e4m3, gradients of outputs to e5m2, which has more range. Results are bfloat16. The
maximum is that of the array on all devices, so the roundings do not depend on the mesh.

The factors reach the product as bfloat16 values that 8 bits hold exactly. XLA multiplies them in fp8 where the hardware
can; elsewhere bfloat16 products of the same values are computed, so that fp8 can be tried and tested on any device.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxtrain.base.annotations import AnyArray, PyTree
from jaxtrain.config.sections.precision_keys import NARROW
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

FP8 = "fp8"


@dataclass(frozen=True)
class Format:
    """In what products are computed, and which layers of a stack are left out of it."""

    kind: str = ""  # one of NARROW; else products are as they are
    at_start: int = 0  # layers at either end of a stack whose products are as they are
    at_end: int = 0

    def leaves_out(self, number: AnyArray, layers: int) -> AnyArray:
        """Return whether a layer of so many is one of those; `number` may be traced."""
        return (number < self.at_start) | (number >= layers - self.at_end)


_AS_THEY_ARE = Format()
_format = contextvars.ContextVar("jaxtrain_format", default=_AS_THEY_ARE)


@contextlib.contextmanager
def in_precision(precision: str, at_start: int = 0, at_end: int = 0) -> Iterator[None]:
    """Trace the products in this block in one of NARROW; by any other name as they are."""
    token = _format.set(Format(precision, at_start, at_end) if precision in NARROW else _AS_THEY_ARE)
    try:
        yield
    finally:
        _format.reset(token)


def current_format() -> Format:
    """Return in what products are traced."""
    return _format.get()


def is_narrow() -> bool:
    """Return whether the factors of products are rounded."""
    return bool(_format.get().kind)


def is_fp8() -> bool:
    """Return whether products are traced in fp8."""
    return _format.get().kind == FP8


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


Factor = jax.Array | Rounded


def multiply(product: Product, x: jax.Array, weight: jax.Array, noise: PyTree = None) -> jax.Array:
    """Return `product(x, weight)` in the narrow format that is traced, with gradients that are computed in it too.

    `noise`: the random bits of tokens for stochastic rounding (models/training_noise.py), if there are any.
    """
    if not is_fp8():
        return _multiply_in_blocks(product, x, weight, noise, current_format().kind)

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

    kind = abstract(x)
    apply.defvjp(output, backward)
    return apply(x, weight)


def _multiply_in_blocks(product: Product, x: jax.Array, weight: jax.Array, noise: PyTree, kind: str) -> jax.Array:
    from jaxtrain.sharding import block_products  # which only these formats read

    @jax.custom_vjp
    def apply(x, weight, noise):
        return block_products.output(product, x, weight, kind)

    def backward(saved, dy):
        x, weight, noise = saved
        return (block_products.input_gradient(product, input_kind, weight, dy, kind, noise),
                block_products.weight_gradient(product, x, weight, dy, kind, noise), None)

    input_kind = abstract(x)
    apply.defvjp(lambda x, weight, noise: (apply(x, weight, noise), (x, weight, noise)), backward)
    return apply(x, weight, noise)


def sent(x: jax.Array, send: Callable[[jax.Array], jax.Array] = lambda x: x) -> tuple[jax.Array, jax.Array]:
    """Return the values of an array in e4m3 after `send`, a linear function that moves them, and their scale.

    The values have the array's dtype, so that they have a gradient: that of what was sent, as if nothing were rounded.
    """
    @jax.custom_vjp
    def apply(x):
        rounded = Rounded.of(x, FORWARD)
        return send(rounded.values).astype(x.dtype), rounded.scale

    kind = abstract(x)
    apply.defvjp(lambda x: (apply(x), None), lambda _, d: (transposed(send, kind, d[0]),))
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
        return transposed(lambda x: product(x, wide(*at_rest)), kind, dy), *(None for _ in at_rest)

    kind = abstract(x)
    apply.defvjp(lambda x, *at_rest: (apply(x, *at_rest), at_rest), backward)
    return apply(x, *at_rest)


def forward(product: Product, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the output of a product whose gradients are computed by the next two functions."""
    return multiply(product, x, weight) if is_narrow() else product(x, weight)


def input_gradient(product: Product, x: jax.Array | jax.ShapeDtypeStruct, weight: jax.Array,
                   dy: jax.Array) -> jax.Array:
    """Return the gradient with respect to the input alone, from that of the output; `x` may be abstract."""
    if not is_narrow():
        return transposed(lambda x: product(x, weight), x, dy)
    if not is_fp8():
        from jaxtrain.sharding import block_products

        return block_products.input_gradient(product, x, weight, dy, current_format().kind)
    return _input_gradient(product, x, Rounded.of(weight, FORWARD), Rounded.of(dy, BACKWARD))


def weight_gradient(product: Product, x: jax.Array, weight: jax.Array | jax.ShapeDtypeStruct,
                    dy: jax.Array) -> jax.Array:
    """Return the gradient with respect to the weight alone, from that of the output; `weight` may be abstract."""
    if not is_narrow():
        return transposed(lambda weight: product(x, weight), weight, dy)
    if not is_fp8():
        from jaxtrain.sharding import block_products

        return block_products.weight_gradient(product, x, weight, dy, current_format().kind)
    return _weight_gradient(product, Rounded.of(x, FORWARD), weight, Rounded.of(dy, BACKWARD))


def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and layout of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.typeof(x).sharding)


def _input_gradient(product: Product, x: jax.Array | jax.ShapeDtypeStruct, weight: Rounded, dy: Rounded) -> jax.Array:
    with exact_sums():
        return scaled(transposed(lambda x: product(x, weight.wide), x, dy.wide), weight, dy)


def _weight_gradient(product: Product, x: Rounded, weight: jax.Array | jax.ShapeDtypeStruct, dy: Rounded) -> jax.Array:
    with exact_sums():
        return scaled(transposed(lambda weight: product(x.wide, weight), weight, dy.wide), x, dy)


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
