"""The router's product of bfloat16 activations and float32 vectors, as exact as in float32, on matrix units.

A float32 number has 24 significant bits, and a bfloat16 one has 8: it is the sum of three. The product of two bfloat16
numbers is exact in float32, in which matrix units add them up. So three products of bfloat16 numbers give what one of
float32 numbers does, up to the order of the sum; GPUs have no matrix units for float32, and TPUs take six passes.

Shape suffixes: B batch, T sequence, D embedding, E experts, N tokens.
"""


import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.base.annotations import PyTree

F32 = jnp.float32


def router_product(x_BTD: jax.Array, kernel_DE: jax.Array) -> jax.Array:
    """Return the logits of experts in float32."""
    if x_BTD.dtype != jnp.bfloat16 or kernel_DE.dtype != F32:
        return jnp.einsum("btd,de->bte", x_BTD.astype(F32), kernel_DE, precision=lax.Precision.HIGHEST)
    logits_NE = _in_three(x_BTD.reshape(-1, x_BTD.shape[-1]), kernel_DE)
    return logits_NE.reshape(*x_BTD.shape[:2], -1)


def parts(a: jax.Array) -> list[jax.Array]:
    """Return three bfloat16 arrays whose sum is a float32 one."""
    found, rest = [], a
    for _ in range(3):
        # Not a conversion there and back, which XLA may leave out as excess precision.
        rounded = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        found.append(rounded.astype(jnp.bfloat16))
        rest = rest - rounded
    return found


@jax.custom_vjp
def _in_three(x_ND: jax.Array, kernel_DE: jax.Array) -> jax.Array:
    products_N3E = _product("nd,de->ne", x_ND, jnp.concatenate(parts(kernel_DE), 1))
    return _sum_of_parts(products_N3E)


def _forward(x_ND: jax.Array, kernel_DE: jax.Array) -> tuple[jax.Array, PyTree]:
    return _in_three(x_ND, kernel_DE), (x_ND, kernel_DE)


def _backward(saved: PyTree, dlogits_NE: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_ND, kernel_DE = saved
    high, middle, low = parts(dlogits_NE)
    dkernel_DE = _sum_of_parts(_product("nd,ne->de", x_ND, jnp.concatenate([high, middle, low], 1)))
    # This is rounded to bfloat16; what is left out of both is 2^-16 of it.
    first, second, _ = parts(kernel_DE)
    dx_ND = _product("ne,de->nd", jnp.concatenate([middle, high, high], 1), jnp.concatenate([first, second, first], 1))
    return dx_ND.astype(x_ND.dtype), dkernel_DE


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=F32)


def _sum_of_parts(a: jax.Array) -> jax.Array:
    """Return the sum of the three parts of the last dimension, from the smallest on."""
    high, middle, low = jnp.split(a, 3, axis=-1)
    return low + middle + high


_in_three.defvjp(_forward, _backward)
