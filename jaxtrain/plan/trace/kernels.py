"""Costs of attention kernels, and stand-ins for those of cuDNN, which can be traced anywhere and are never run."""

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxtrain.kernels import grouped_matmul
from jaxtrain.kernels.attention import PACKED, cudnn_attention, cudnn_kernel, packed_attention, splash_attention
from jaxtrain.kernels.attention.xla_attention import BOTH_WAYS

FORWARD, BACKWARD = "attention_forward", "attention_backward"
OWN = {(kernels, phase): f"attention_{kernels}_{phase}" for kernels in PACKED for phase in ("fwd", "dq", "dkv")}
MOSAIC = {phase: name for (kernels, phase), name in OWN.items() if kernels == "mosaic"}
PHASE = re.compile(rf"(?:splash_m[hq]a|(?:{'|'.join(PACKED)})_attention)_(fwd|dkv_dk|dkv_dv|dkv|dq)")  # in a name
ROWS_BY_GROUP, GROUP_BY_GROUP = "grouped_matmul_of_rows", "grouped_matmul_of_groups"


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Replace cuDNN attention by one operation per direction, which keeps operands, result and a row of sums; and each
    kernel of packed attention and of a grouped matmul by one operation.
    """
    functions = {grouped_matmul: (_product, _products_of_groups), cudnn_attention: (at_once,),
                 cudnn_kernel: (part, part_gradients), packed_attention: (_results, _by_queries, _by_keys_and_values)}
    before = [(module, one.__name__, getattr(module, one.__name__)) for module, own in functions.items() for one in own]
    for module, own in functions.items():
        for one in own:
            setattr(module, one.__name__, one)
    try:
        yield
    finally:
        for saved in before:
            setattr(*saved)


def flops(name: str, shapes: list[tuple[int, ...]], window: int = 0, filled: int = 0, turned: int = 0) -> float:
    """Return the FLOP of these operations on arguments of these shapes: queries [B, T, H, K], then keys and values; or
    rows [R, K] and weights of groups [G, K, N], or two arrays of rows.

    `window`: the tokens that a query may look back on, itself included; 0: all; BOTH_WAYS: later ones, too. `filled`:
    the rows that are in groups.
    `turned`: whether the two arrays of rows are transposed.
    """
    if name == ROWS_BY_GROUP:
        return 2.0 * filled * math.prod(shapes[1][1:])
    if name == GROUP_BY_GROUP:
        return 2.0 * filled * math.prod(shape[0 if turned else 1] for shape in shapes[:2])
    if told := next((told for told, called in OWN.items() if called == name), ()):
        apart = told == ("mosaic", "dkv") and shapes[0][3] > packed_attention.TOGETHER
        return sum(packed_flops(phase, shapes, window) for phase in (("dkv_dk", "dkv_dv") if apart else told[1:]))
    (B, T, H, K), (_, S, _, _), (_, _, _, V) = shapes[:3]
    # With an array as mask cuDNN computes all pairs of tokens; what it does of a window then was not measured.
    masked = len(shapes) > (3 if name == FORWARD else 6) and window <= 0
    causal, window = window != BOTH_WAYS and T == S and not masked, min(window, S) if window > 0 else S
    # Causal: queries 0..window-1 see half a window on average, the later ones all of it.
    seen = B * H * (T * window - (window**2 / 2 if causal else 0))
    product = 2.0 * seen
    return product * (K + V) if name == FORWARD else product * (3 * K + 2 * V)  # scores again, and four gradients


def _product(how: grouped_matmul.How, rows_RK: jax.Array, weights: jax.Array, sizes_G: jax.Array, transposed: bool,
             dtype: DTypeLike | None = None) -> jax.Array:
    out = jax.ShapeDtypeStruct((rows_RK.shape[0], weights.shape[1 if transposed else 2]), dtype or rows_RK.dtype)
    return jax.ffi.ffi_call(ROWS_BY_GROUP, out)(rows_RK, weights, sizes_G, filled=np.int32(how[1]))


def _products_of_groups(how: grouped_matmul.How, rows: jax.Array, others: jax.Array, sizes_G: jax.Array,
                        transposed: bool, dtype: DTypeLike | None = None) -> jax.Array:
    K, N = (a.shape[0 if transposed else 1] for a in (rows, others))
    out = jax.ShapeDtypeStruct((sizes_G.size, K, N), dtype or rows.dtype)
    return jax.ffi.ffi_call(GROUP_BY_GROUP, out)(rows, others, sizes_G, filled=np.int32(how[1]),
                                                 turned=np.int32(transposed))


def _results(options, q_BTHK, k_BTGK, v_BTGK, seen_BNT):
    B, T, H, _ = q_BTHK.shape
    out = (jax.ShapeDtypeStruct((B, T, H, v_BTGK.shape[3]), q_BTHK.dtype),
           jax.ShapeDtypeStruct((B, H, T), jnp.float32))
    return jax.ffi.ffi_call(OWN[options[0], "fwd"], out)(q_BTHK, k_BTGK, v_BTGK, seen_BNT, window=np.int32(options[1]))


def _by_queries(options, q_BTHK, *others):
    out = jax.ShapeDtypeStruct(q_BTHK.shape, q_BTHK.dtype)
    return jax.ffi.ffi_call(OWN[options[0], "dq"], out)(q_BTHK, *others, window=np.int32(options[1]))


def _by_keys_and_values(options, q_BTHK, k_BTGK, v_BTGK, *others):
    out = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_BTGK, v_BTGK))
    return jax.ffi.ffi_call(OWN[options[0], "dkv"], out)(q_BTHK, k_BTGK, v_BTGK, *others, window=np.int32(options[1]))


def phase_of(name: str) -> str:
    """Return which kernel of splash or packed attention has this name: "fwd", "dkv" or "dq", or "dkv_dk" or "dkv_dv",
    where there is one for each; "" for any other.
    """
    found = PHASE.search(name)
    return found[1] if found else ""


def packed_flops(phase: str, shapes: Sequence[tuple[int, ...]], window: int = 0) -> float:
    """Return the FLOP of a kernel of packed attention on queries, keys and values of these shapes.

    Whole blocks count, as if each row were one document, since documents are not known before a run.
    """
    (B, T, H, K), _, (*_, V) = shapes[:3]
    pairs = _pairs(T, T, packed_attention.BLOCK, window)
    return 2.0 * B * H * pairs * {
        "fwd": K + V, "dq": 2 * K + V, "dkv": 2 * K + 2 * V, "dkv_dk": 2 * K + V, "dkv_dv": K + V}[phase]


def of_documents(length: int, documents: int) -> float:
    """Return the share of the blocks of a row that packed attention computes for so many documents of equal length.

    They begin anywhere, so each reaches into one block more than it fills.
    """
    if documents == 1:
        return 1.0
    blocks, each = (tokens / packed_attention.BLOCK for tokens in (length, length / documents))
    return min(1.0, documents * (each + 1) * (each + 2) / (blocks * (blocks + 1)))


def splash_flops(phase: str, shapes: Sequence[tuple[int, ...]], window: int = 0) -> float:
    """Return the FLOP of a kernel on queries, keys and values of these shapes, [..., heads, T, width].

    It computes whole blocks: those in which some query sees some key.
    """
    (*heads, T, K), (*_, S, _), (*_, V) = shapes[:3]
    pairs = _pairs(T, S, splash_attention.block_of(T, window), window)
    widths = {"fwd": K + V, "dq": 2 * K + V, "dkv": 2 * K + 2 * V + (K if splash_attention.is_fused(S, window) else 0)}
    return 2.0 * math.prod(heads) * pairs * widths[phase]


def _pairs(T: int, S: int, side: int, window: int) -> int:
    """Return the pairs of queries and keys in blocks in which some query sees some key."""
    if window == BOTH_WAYS:
        return T * S
    back = T // side if not window else -(-(window - 1) // side)  # blocks before its own that a query may see
    return side**2 * sum(min(row, back) + 1 for row in range(T // side))


def at_once(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BT: jax.Array | None,
            window: int, key_segments_BS: jax.Array | None = None) -> jax.Array:
    """Return cuDNN's attention as one operation in each direction."""
    keys_BS = segments_BT if key_segments_BS is None else key_segments_BS
    if keys_BS is None or (keys_BS.dtype == bool and window == BOTH_WAYS):  # none, or lengths
        return _kernel(window, q_BTHK, k_BSGK, v_BSGK)
    assert segments_BT is not None
    return _kernel(window, q_BTHK, k_BSGK, v_BSGK, *_mask(
        segments_BT[:, None, :, None] == keys_BS[:, None, None, :], q_BTHK.dtype))


def part(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array,
         seen_BTS: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return cuDNN's attention to a part of the keys."""
    mask = () if seen_BTS is None else _mask(seen_BTS[:, None], q_BTHK.dtype)
    out, sums = _results_and_sums(BOTH_WAYS, q_BTHK, k_BSGK, v_BSGK, *mask)
    return out, sums.swapaxes(1, 2)


def part_gradients(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, pull_BTHK: jax.Array, out_BTHK: jax.Array,
                   lse_BTH: jax.Array, seen_BTS: jax.Array | None) -> tuple[jax.Array, ...]:
    """Return its contributions to the gradients."""
    mask = () if seen_BTS is None else _mask(seen_BTS[:, None], q_BTHK.dtype)
    saved = q_BTHK, k_BSGK, v_BSGK, *mask, out_BTHK, lse_BTH.swapaxes(1, 2)
    return _backward(BOTH_WAYS, saved, pull_BTHK)[:3]


def _mask(same: jax.Array, dtype: DTypeLike) -> tuple[jax.Array]:
    return (jnp.where(same, jnp.zeros((), dtype), -1e30),)  # like JAX's mask for cuDNN


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel(window, q, k, v, *mask):
    return _forward(window, q, k, v, *mask)[0]


def _results_and_sums(window, q, k, v, *mask):
    B, T, H, _ = q.shape
    out = jax.ShapeDtypeStruct((B, T, H, v.shape[-1]), q.dtype)
    rows = jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    return jax.ffi.ffi_call(FORWARD, (out, rows))(q, k, v, *mask, window=np.int32(window))


def _forward(window, q, k, v, *mask):
    result, sums = _results_and_sums(window, q, k, v, *mask)
    # Policies keep all that the kernel returns, as `cudnn_attention.kept_results` does.
    result, sums = checkpoint_name(result, "attention"), checkpoint_name(sums, "attention")
    return result, (q, k, v, *mask, result, sums)


def _backward(window, saved, cotangent):
    like = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved[:3])
    gradients = jax.ffi.ffi_call(BACKWARD, like)(*saved, cotangent, window=np.int32(window))
    return (*gradients, *(jnp.zeros_like(mask) for mask in saved[3:-2]))


_kernel.defvjp(_forward, _backward)
