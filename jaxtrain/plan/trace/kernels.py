"""Stand-ins for kernels that only the target has: they can be traced anywhere, have a known cost, and are never run."""

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.kernels import grouped_matmul
from jaxtrain.models import attention
from jaxtrain.sharding import rules as sharding

FORWARD, BACKWARD = "attention_forward", "attention_backward"
ROWS_BY_GROUP, GROUP_BY_GROUP = "grouped_matmul_of_rows", "grouped_matmul_of_groups"


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Replace cuDNN attention by one operation per direction, which keeps operands, result and a row of sums; and each
    product of a grouped matmul by one operation.
    """
    before = attention._BACKENDS["cudnn"], grouped_matmul._product, grouped_matmul._products_of_groups
    attention._BACKENDS["cudnn"] = _attention
    grouped_matmul._product, grouped_matmul._products_of_groups = _product, _products_of_groups
    try:
        yield
    finally:
        attention._BACKENDS["cudnn"], grouped_matmul._product, grouped_matmul._products_of_groups = before


def flops(name: str, shapes: list[tuple[int, ...]], window: int = 0, filled: int = 0) -> float:
    """Return the FLOP of these operations on arguments of these shapes: queries [B, T, H, K], then keys and values; or
    rows [R, K] and weights of groups [G, K, N], or two arrays of rows.

    `window`: the tokens that a query may look back on, itself included; 0: all. `filled`: the rows that are in groups.
    """
    if name in (ROWS_BY_GROUP, GROUP_BY_GROUP):
        return 2.0 * filled * math.prod(shapes[1][1:]) * (shapes[0][1] if name == GROUP_BY_GROUP else 1)
    (B, T, H, K), (_, S, _, _), (_, _, _, V) = shapes[:3]
    window = min(window or S, S)
    # Causal: queries 0..window-1 see half a window on average, the later ones all of it.
    seen = B * H * (T * window - (window**2 / 2 if T == S else 0))
    product = 2.0 * seen
    return product * (K + V) if name == FORWARD else product * (3 * K + 2 * V)  # scores again, and four gradients


def _product(filled: int, rows_RK: jax.Array, weights: jax.Array, sizes_G: jax.Array, transposed: bool) -> jax.Array:
    out = jax.ShapeDtypeStruct((rows_RK.shape[0], weights.shape[1 if transposed else 2]), rows_RK.dtype)
    return jax.ffi.ffi_call(ROWS_BY_GROUP, out)(rows_RK, weights, sizes_G, filled=np.int32(filled))


def _products_of_groups(filled: int, rows_RK: jax.Array, others_RN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    out = jax.ShapeDtypeStruct((sizes_G.size, rows_RK.shape[1], others_RN.shape[1]), rows_RK.dtype)
    return jax.ffi.ffi_call(GROUP_BY_GROUP, out)(rows_RK, others_RN, sizes_G, filled=np.int32(filled))


def _attention(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BT: Any, window: int) -> jax.Array:
    def local(q, k, v, segments):
        if segments is None:
            return _kernel(window, q, k, v)
        same = segments[:, None, :, None] == segments[:, None, None, :]
        return _kernel(window, q, k, v, jnp.where(same, jnp.zeros((), q.dtype), -1e30))  # like JAX's mask for cuDNN

    spec = sharding.activation_spec(*attention.HEADS)
    if spec is None:
        return local(q_BTHK, k_BSGK, v_BSGK, segments_BT)
    rows = None if segments_BT is None else sharding.activation_spec("batch", "seq")
    region = sharding.manual_region(local, in_specs=(spec,) * 3 + (rows,), out_specs=spec)
    return region(q_BTHK, k_BSGK, v_BSGK, segments_BT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel(window, q, k, v, *mask):
    return _forward(window, q, k, v, *mask)[0]


def _forward(window, q, k, v, *mask):
    B, T, H, _ = q.shape
    out = jax.ShapeDtypeStruct((B, T, H, v.shape[-1]), q.dtype)
    rows = jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    result, sums = jax.ffi.ffi_call(FORWARD, (out, rows))(q, k, v, *mask, window=np.int32(window))
    # Policies keep all that the kernel returns, as `models.attention.kept_results` does.
    result, sums = checkpoint_name(result, "attention"), checkpoint_name(sums, "attention")
    return result, (q, k, v, *mask, result, sums)


def _backward(window, saved, cotangent):
    like = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved[:3])
    gradients = jax.ffi.ffi_call(BACKWARD, like)(*saved, cotangent, window=np.int32(window))
    return (*gradients, *(jnp.zeros_like(mask) for mask in saved[3:-2]))


_kernel.defvjp(_forward, _backward)
