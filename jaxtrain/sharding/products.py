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
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxtrain.base.annotations import AnyArray, PyTree
from jaxtrain.base.narrow_formats import BLOCKS, NARROW
from jaxtrain.sharding.contractions import (
    BACKWARD,
    FORWARD,
    Product,
    Rounded,
    abstract,
    exact_sums,
    scaled,
    transposed,
)

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



Factor = jax.Array | Rounded


def multiply(product: Product, x: jax.Array, weight: jax.Array, noise: PyTree = None) -> jax.Array:
    """Return `product(x, weight)` in the narrow format that is traced, with gradients that are computed in it too.

    `noise`: the random bits of tokens for stochastic rounding (models/training_noise.py), if there are any.
    """
    if (blocks := current_format().kind) in BLOCKS:
        return _multiply_in_blocks(product, x, weight, noise, blocks)

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
    if current_format().kind != FP8:
        from jaxtrain.sharding import block_products

        return block_products.input_gradient(product, x, weight, dy, current_format().kind)
    return _input_gradient(product, x, Rounded.of(weight, FORWARD), Rounded.of(dy, BACKWARD))


def weight_gradient(product: Product, x: jax.Array, weight: jax.Array | jax.ShapeDtypeStruct,
                    dy: jax.Array) -> jax.Array:
    """Return the gradient with respect to the weight alone, from that of the output; `weight` may be abstract."""
    if not is_narrow():
        return transposed(lambda weight: product(x, weight), weight, dy)
    if current_format().kind != FP8:
        from jaxtrain.sharding import block_products

        return block_products.weight_gradient(product, x, weight, dy, current_format().kind)
    return _weight_gradient(product, Rounded.of(x, FORWARD), weight, Rounded.of(dy, BACKWARD))


def _input_gradient(product: Product, x: jax.Array | jax.ShapeDtypeStruct, weight: Rounded, dy: Rounded) -> jax.Array:
    with exact_sums():
        return scaled(transposed(lambda x: product(x, weight.wide), x, dy.wide), weight, dy)


def _weight_gradient(product: Product, x: Rounded, weight: jax.Array | jax.ShapeDtypeStruct, dy: Rounded) -> jax.Array:
    with exact_sums():
        return scaled(transposed(lambda weight: product(x.wide, weight), weight, dy.wide), x, dy)
