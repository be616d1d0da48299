"""cuDNN's attention, for NVIDIA GPUs.

With a mask, as of packed rows, it computes all pairs of tokens. Long packed rows are therefore computed in tiles
(cudnn_tiles.py): those in which no query sees a key are left out, and there is no mask of the whole row.

Shape suffixes: B batch, T and S sequence, H query heads, G key/value heads, K head width.
"""

import jax
import jax.extend.core
import jax.numpy as jnp

from jaxtrain.kernels.attention.xla_attention import BOTH_WAYS

PADDING = 0  # of sequences: none
LONG = 16384  # tokens of packed rows from which on they are computed in tiles


def refusal(platform: str, dtype: jnp.dtype, seq_len: int, head_dim: int, soft_cap: float) -> str:
    """Return why it cannot compute this; "" if it can."""
    reasons = {
        "it runs on NVIDIA GPUs only": platform not in ("gpu", "cuda"),
        f"it computes in bfloat16 or float16, not {dtype}": dtype not in (jnp.bfloat16, jnp.float16),
        f"head_dim={head_dim} is not a multiple of 8 up to 256": head_dim % 8 or head_dim > 256,
        f"head_dim={head_dim} is over 128, which needs compute capability 9.0 or more":
            head_dim > 128 and platform == "gpu" and _compute_capability() < 9,
        f"seq_len={seq_len} is odd": seq_len % 2,
        "it does not cap scores": soft_cap,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _compute_capability() -> float:
    """Return the compute capability of the local GPU; unknown ones count as the newest."""
    return float(getattr(jax.local_devices()[0], "compute_capability", "inf"))


def attention(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BT: jax.Array | None, window: int,
              soft_cap: float, sinks_H: None = None, key_segments_BS: jax.Array | None = None) -> jax.Array:
    """Return attention of one device's arrays."""
    assert not soft_cap and sinks_H is None, "refused before"
    if segments_BT is not None and key_segments_BS is None and q_BTHK.shape[1] >= LONG and window != BOTH_WAYS:
        from jaxtrain.kernels.attention import cudnn_tiles

        if cudnn_tiles.fits(q_BTHK.shape[1], q_BTHK.shape[1], own=True):
            return cudnn_tiles.attention(window, q_BTHK, k_BSGK, v_BSGK, segments_BT)
    return at_once(q_BTHK, k_BSGK, v_BSGK, segments_BT, window, key_segments_BS)


def at_once(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BT: jax.Array | None, window: int,
            key_segments_BS: jax.Array | None = None) -> jax.Array:
    """Return attention by one kernel in each direction; of packed rows with a mask of all pairs."""
    keys_BS, mask, lengths_B = segments_BT if key_segments_BS is None else key_segments_BS, None, None
    if keys_BS is not None and keys_BS.dtype == bool and window == BOTH_WAYS:  # keys without padding, which comes last
        lengths_B = jnp.maximum(keys_BS.sum(1, dtype=jnp.int32), 1)
        # What the kernel writes as the gradient of padding is not said, and is dropped here.
        k_BSGK, v_BSGK = (jnp.where(keys_BS[:, :, None, None], x, 0) for x in (k_BSGK, v_BSGK))
    elif keys_BS is not None:
        queries_BT = jnp.ones(q_BTHK.shape[:2], keys_BS.dtype) if segments_BT is None else segments_BT
        mask = queries_BT[:, None, :, None] == keys_BS[:, None, None, :]
    # The kernel needs keys and values of one width.
    scale, width, widest = q_BTHK.shape[-1]**-0.5, v_BSGK.shape[-1], max(q_BTHK.shape[-1], v_BSGK.shape[-1])
    q_BTHK, k_BSGK, v_BSGK = (jnp.pad(x, ((0, 0),) * 3 + ((0, widest - x.shape[-1]),))
                              for x in (q_BTHK, k_BSGK, v_BSGK))
    return jax.nn.dot_product_attention(
        q_BTHK, k_BSGK, v_BSGK, mask=mask, scale=scale, is_causal=window != BOTH_WAYS, implementation="cudnn",
        key_value_seq_lengths=lengths_B,
        local_window_size=(window - 1, 0) if window > 0 else None)[..., :width]


def kept_results(primitive: jax.extend.core.Primitive, *_, **__) -> bool:
    """Keep what cuDNN's forward kernel returns, as a policy of `jax.checkpoint`.

    Its backward kernel reads the output and the log-sum-exp of every row. A name around the call reaches only the
    output, so that for the log-sum-exp the whole kernel would run again. The other backends name what they keep.
    """
    return primitive.name == "dot_product_attention_fwd_wrapper"
