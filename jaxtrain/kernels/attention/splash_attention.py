"""Splash attention of the JAX wheel, for TPUs: a tile of scores at a time, and none where no query sees a key.

Its forward kernel keeps the output and the log-sum-exp of every row, under the name "attention", for the backward
kernels; of a rematerialised layer they are computed once where the policy keeps that name. On CPUs the kernels are
interpreted: slow, but the same numbers.

Shape suffixes: B batch, T and S sequence, H query heads, G key/value heads, K head width.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.kernels.attention.xla_attention import BOTH_WAYS
from jaxtrain.sharding import mesh_context

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
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    (B, T, H, K), S = q_BTHK.shape, k_BSGK.shape[1]
    q_BHTK, k_BGSK, v_BGSK = (jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, -x.shape[1] % LANES), (0, 0)))
                              for x in (q_BTHK * K**-0.5, k_BSGK, v_BSGK))
    kernel = _kernel(q_BHTK.shape[2], k_BGSK.shape[2], H, window, soft_cap, mesh_context.platform() == "cpu")
    if sinks_H is not None:  # in the dtype of their gradient, which the kernel's backward pass returns in that of q
        kernel = functools.partial(kernel, sinks=sinks_H.astype(q_BTHK.dtype))
    with jax.named_scope(f"window_{window}"):  # by this name jaxtrain.plan knows what the kernels compute
        keys_BS = segments_BT if key_segments_BS is None else key_segments_BS
        if keys_BS is None and (window != BOTH_WAYS or S % LANES == 0):  # what is behind all others is not seen
            out_BHTK = jax.vmap(kernel)(q_BHTK, k_BGSK, v_BGSK)
        else:
            ids = (jnp.ones(shape, jnp.int32) if x is None else x.astype(jnp.int32)
                   for x, shape in ((segments_BT, (B, T)), (keys_BS, (B, S))))
            out_BHTK = jax.vmap(kernel)(q_BHTK, k_BGSK, v_BGSK, SegmentIds(*(
                jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES)), constant_values=NOBODY) for x in ids)))
    return jnp.swapaxes(out_BHTK[:, :, :T], 1, 2)


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
