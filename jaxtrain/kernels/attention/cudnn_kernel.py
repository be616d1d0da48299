"""cuDNN's attention to a part of a row's keys, with what it takes to merge it with that to others.

`jax.nn.dot_product_attention` returns the log-sum-exp of each row rounded to the dtype of the output, and its gradient
is that of these keys alone. Here it is in float32, and the backward kernel, which is called as JAX's own rule calls it,
gets the output and the log-sum-exp over all keys.

Shape suffixes: B batch, T and S queries and keys, H query heads, G key/value heads, K head width.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

LOWEST = -1e30  # the log-sum-exp of no keys


def part(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array,
         seen_BTS: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return out [B, T, H, K] in the dtype of queries and its log-sum-exp [B, T, H] in float32.

    seen_BTS: which keys each query sees; None: all.
    """
    from jax._src.cudnn import fused_attention_stablehlo as wheel

    width, widest = v_BSGK.shape[-1], max(q_BTHK.shape[-1], v_BSGK.shape[-1])
    mask = None if seen_BTS is None else jnp.broadcast_to(seen_BTS[:, None], (len(q_BTHK), 1, *seen_BTS.shape[1:]))
    results: Any = wheel.dot_product_attention(
        *(_padded(x, widest) for x in (q_BTHK, k_BSGK, v_BSGK)), mask=mask, scale=q_BTHK.shape[-1]**-0.5,
        mask_type=wheel.MaskType.NO_MASK, qkv_layout="BTNH", return_residual=True)
    out_BTHK, lse_BHT = results
    lse_BTH = lse_BHT.swapaxes(1, 2)
    out_BTHK = out_BTHK[..., :width]
    if seen_BTS is None:
        return out_BTHK, lse_BTH
    some_BT = seen_BTS.any(-1)
    return jnp.where(some_BT[..., None, None], out_BTHK, 0), jnp.where(some_BT[..., None], lse_BTH, LOWEST)


def part_gradients(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, pull_BTHK: jax.Array, out_BTHK: jax.Array,
                   lse_BTH: jax.Array, seen_BTS: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the contributions of these keys to the gradients.

    out_BTHK, lse_BTH: those over all keys.
    """
    from jax._src.cudnn import fused_attention_stablehlo as wheel

    (K, width), none = (q_BTHK.shape[-1], v_BSGK.shape[-1]), jnp.zeros(0, q_BTHK.dtype)
    q, k, v, out, pull = (_padded(x, max(K, width)) for x in (q_BTHK, k_BSGK, v_BSGK, out_BTHK, pull_BTHK))
    bias = none if seen_BTS is None else jnp.where(
        seen_BTS, jnp.zeros((), q_BTHK.dtype), wheel.get_large_negative_number(q_BTHK.dtype))[:, None]
    if seen_BTS is not None:
        bias = jnp.broadcast_to(bias, (len(q_BTHK), *bias.shape[1:]))
    newer = {"score_mod": None} if "score_mod" in inspect.signature(
        wheel._dot_product_attention_bwd_rule).parameters else {}
    dq, dk, dv, *_ = wheel._dot_product_attention_bwd_p_wrapper.bind(
        q, k, v, bias, *(none,) * 6, lse_BTH.swapaxes(1, 2), out, pull, scale=K**-0.5, seed=42, dropout_rate=0.0,
        variadic_args=(seen_BTS is not None, False), mask_type=wheel.MaskType.NO_MASK,
        layout=wheel.AttentionLayout.BTNH.value, sliding_window_length=None, **newer)
    return dq[..., :K], dk[..., :K], dv[..., :width]


def _padded(x: jax.Array, width: int) -> jax.Array:
    """Pad keys or values to this width, as the kernel needs them of one."""
    return jnp.pad(x, ((0, 0),) * 3 + ((0, width - x.shape[-1]),))
