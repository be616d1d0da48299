"""Splash attention of the JAX wheel, for TPUs: a tile of scores at a time, and none where no query sees a key.

Its forward kernel keeps the output and the log-sum-exp of every row, under the name "attention", for the backward
kernels; of a rematerialised layer they are computed once where the policy keeps that name. On CPUs the kernels are
interpreted: slow, but the same numbers.

Shape suffixes: B batch, T and S sequence, H query heads, G key/value heads, K head width.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxtrain.kernels.attention.xla_attention import BOTH_WAYS
from jaxtrain.sharding import mesh_context

if TYPE_CHECKING:
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

LANES = 128  # of a TPU's registers: sequences are padded to a multiple
PADDING = LANES  # of sequences, to a multiple; `auto` leaves shorter ones to another backend
LONGEST = 2**17
NOBODY = -1  # the segment of these
FUSED = 4  # blocks of keys up to which one backward kernel is used, which writes dq once for each of them


def refusal(platform: str, dtype: jnp.dtype, seq_len: int, head_dim: int, soft_cap: float) -> str:
    """Return why it cannot compute this; "" if it can."""
    reasons = {
        "it runs on TPUs only (and, interpreted, on CPUs)": platform not in ("tpu", "cpu"),
        f"it computes in bfloat16 or float32, not {dtype}": dtype not in (jnp.bfloat16, jnp.float32),
        f"head_dim={head_dim} is over 256": head_dim > 256,
        f"seq_len={seq_len} is over {LONGEST:,}, for which its table of blocks is too large": seq_len > LONGEST,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def attention(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BT: jax.Array | None, window: int,
              soft_cap: float, sinks_H: jax.Array | None = None, key_segments_BS: jax.Array | None = None) -> jax.Array:
    """Return attention of one device's arrays."""
    T, S = q_BTHK.shape[1], k_BSGK.shape[1]
    keys_BS = segments_BT if key_segments_BS is None else key_segments_BS
    kernel = _kernel(*(-(-tokens // LANES) * LANES for tokens in (T, S)), q_BTHK.shape[2], window, soft_cap,
                     mesh_context.platform() == "cpu")
    if sinks_H is not None:  # in the dtype of their gradient, which the kernel's backward pass returns in that of q
        kernel = functools.partial(kernel, sinks=sinks_H.astype(q_BTHK.dtype))
    with jax.named_scope(f"window_{window}"):  # by this name jaxtrain.plan knows what the kernels compute
        out_BHTK = jax.vmap(kernel)(*_by_head(q_BTHK * q_BTHK.shape[3]**-0.5, k_BSGK, v_BSGK),
                                    *_ids(q_BTHK, k_BSGK, segments_BT, keys_BS, window))
    return jnp.swapaxes(out_BHTK[:, :, :T], 1, 2)


def _by_head(*arrays: jax.Array) -> list[jax.Array]:
    """Return arrays [B, T, H, ...] as the kernels take them: [B, H, T, ...], with T a multiple of the lanes."""
    return [jnp.swapaxes(jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES), *((0, 0),) * (x.ndim - 2))), 1, 2)
            for x in arrays]


def _ids(q_BTHK: jax.Array, k_BSGK: jax.Array, segments_BT: jax.Array | None, keys_BS: jax.Array | None,
         window: int) -> "list[SegmentIds]":
    """Return the segments of tokens as the kernels take them; none, where all are in one."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    (B, T), S = q_BTHK.shape[:2], k_BSGK.shape[1]
    if keys_BS is None and (window != BOTH_WAYS or S % LANES == 0):  # what is behind all others is not seen
        return []
    ids = (jnp.ones(shape, jnp.int32) if x is None else x.astype(jnp.int32)
           for x, shape in ((segments_BT, (B, T)), (keys_BS, (B, S))))
    return [SegmentIds(*(jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES)), constant_values=NOBODY) for x in ids))]


# ---------------------------------------------------------------------------- attention to a part of a sequence's keys

def part(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BT: jax.Array | None,
         keys_BS: jax.Array | None, own: bool, soft_cap: float) -> tuple[jax.Array, jax.Array]:
    """Return out [B, T, H, K] and its log-sum-exp [B, T, H], to be merged with those of other keys.

    own: keys are those of the queries' own tokens, whose order is that of their positions; else each query sees all of
    them that are of its segment.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    wheel: Any = splash_attention_kernel
    kernel, window = _of_part(q_BTHK, k_BSGK, own, soft_cap)

    def one(q, k, v, ids=None):
        out, (lse,) = wheel._splash_attention_forward(
            kernel.fwd_mask_info, q, k, v, ids, None, **{**kernel.kwargs, **ALONE, "save_residuals": True})
        return out, lse

    with jax.named_scope(f"window_{window}"):
        out_BHTK, lse_BHT = jax.jit(jax.vmap(one))(*_by_head(q_BTHK * q_BTHK.shape[3]**-0.5, k_BSGK, v_BSGK),
                                                   *_ids(q_BTHK, k_BSGK, segments_BT, keys_BS, window))
    out_BTHK, lse_BTH = (jnp.swapaxes(x, 1, 2)[:, :q_BTHK.shape[1]] for x in (out_BHTK, lse_BHT))
    return out_BTHK, lse_BTH


def part_gradients(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, pull_BTHK: jax.Array, out_BTHK: jax.Array,
                   lse_BTH: jax.Array, segments_BT: jax.Array | None, keys_BS: jax.Array | None, own: bool,
                   soft_cap: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the contributions of these keys to the gradients; out_BTHK, lse_BTH: those over all keys."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    wheel: Any = splash_attention_kernel
    (_, T, _, K), S, (kernel, window) = q_BTHK.shape, k_BSGK.shape[1], _of_part(q_BTHK, k_BSGK, own, soft_cap)

    def one(q, k, v, pull, out, lse, ids=None):
        saved = q, k, v, ids, None, out, lse, kernel.dq_mask_info, kernel.dkv_mask_info
        return wheel._splash_attention_bwd(**{**kernel.kwargs, **ALONE, "save_residuals": False}, res=saved,
                                           do=pull)[3:6]

    with jax.named_scope(f"window_{window}"):
        found = jax.jit(jax.vmap(one))(*_by_head(q_BTHK * K**-0.5, k_BSGK, v_BSGK, pull_BTHK, out_BTHK, lse_BTH),
                                       *_ids(q_BTHK, k_BSGK, segments_BT, keys_BS, window))
    dq, dk, dv = (jnp.swapaxes(x, 1, 2) for x in found)
    return dq[:, :T] * K**-0.5, dk[:, :S], dv[:, :S]


ALONE = {"residual_checkpoint_name": None}  # what policies keep are results over all keys


def _of_part(q_BTHK: jax.Array, k_BSGK: jax.Array, own: bool, soft_cap: float) -> tuple[Any, int]:
    window, (T, S) = 0 if own else BOTH_WAYS, (-(-x.shape[1] // LANES) * LANES for x in (q_BTHK, k_BSGK))
    return _kernel(T, S, q_BTHK.shape[2], window, soft_cap, mesh_context.platform() == "cpu"), window


def block_of(seq_len: int, window: int) -> int:
    """Return the side of a block: the largest power of two up to 1,024 that divides the sequence.

    With a window it is at most about the window, since blocks are computed or skipped as a whole.
    """
    most = max(LANES, min(1024, 1 << (window - 1).bit_length())) if window > 0 else 1024
    return next(size for size in (1024, 512, 256, LANES) if size <= most and seq_len % size == 0)


def is_fused(key_len: int, window: int) -> bool:
    """Return whether one backward kernel computes all gradients, five products for a block instead of seven."""
    return key_len // block_of(key_len, window) <= FUSED


@functools.cache
def _kernel(seq_len: int, key_len: int, heads: int, window: int, soft_cap: float,
            interpret: bool) -> Callable[..., Any]:
    """Return the wheel's kernel of this shape. Its tables of blocks stay NumPy arrays, so that any trace can use them.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as wheel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as tables

    shape = (seq_len, key_len)
    one = (masks.FullMask(shape) if window == BOTH_WAYS else masks.LocalMask(shape, (window - 1, 0), 0) if window
           else masks.CausalMask(shape))
    mask, blocks = masks.MultiHeadMask([one] * heads), (block_of(seq_len, window), block_of(key_len, window))
    (rows, keys), fused = blocks, is_fused(key_len, window)
    inner = min(keys, 512)
    sizes = wheel.BlockSizes(
        block_q=rows, block_kv=keys, block_kv_compute=inner,
        block_q_dkv=rows, block_kv_dkv=keys, block_kv_dkv_compute=inner, use_fused_bwd_kernel=fused,
        block_q_dq=None if fused else rows, block_kv_dq=None if fused else keys)
    forward, function = tables.process_mask(mask, blocks)
    dq = None if fused else tables.process_mask(mask, blocks)[0]
    dkv, _ = tables.process_mask_dkv(mask, blocks, shrink_grid=not fused)
    return wheel.SplashAttentionKernel(
        forward, dq, dkv, block_sizes=sizes, is_mqa=False, save_residuals=False, mask_value=wheel.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=soft_cap or None, residual_checkpoint_name="attention", mask_function=function,
        interpret=interpret)
