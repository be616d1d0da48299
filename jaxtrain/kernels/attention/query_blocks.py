"""Plain attention in blocks of queries: keys that none of a block's queries may see are never computed.

With four blocks these are three eighths of the scores of causal attention. The blocks are unrolled, since their keys
differ in number.

Shape suffixes: B batch, T and S sequence, H query heads, G key/value heads, K head width.
"""

import jax
import jax.numpy as jnp

from jaxtrain.kernels.attention import xla_attention

# Measured on CPUs (docs/performance.md): smaller blocks gain nothing. More blocks gain little, and each adds 0.2 s of
# compiling; they pay for long rows, and with a window, where a smaller block also has fewer keys before it.
SMALLEST, USUAL, MOST, LONG = 64, 4, 8, 2048


def attention(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, segments_BT: jax.Array | None, window: int,
              soft_cap: float, sinks_H: jax.Array | None = None, key_segments_BS: jax.Array | None = None) -> jax.Array:
    """Return what `xla_attention.attention` does: in blocks, where attention is causal and keys are the queries' own.
    """
    own_tokens = key_segments_BS is None and k_BSGK.shape[1] == q_BTHK.shape[1]
    causal = window != xla_attention.BOTH_WAYS
    block_ends = ends(q_BTHK.shape[1], window) if own_tokens and causal else []
    if len(block_ends) < 2:
        return xla_attention.attention(q_BTHK, k_BSGK, v_BSGK, segments_BT, window, soft_cap, sinks_H, key_segments_BS)
    # The gradient of a key is a sum over blocks: in float32, whatever the dtype.
    k, v, results, start = k_BSGK.astype(jnp.float32), v_BSGK.astype(jnp.float32), [], 0
    for end, q in zip(block_ends, jnp.split(q_BTHK, block_ends[:-1], axis=1), strict=True):
        first = max(0, start + 1 - window) if window else 0
        keys = slice(first, end)
        own, theirs = (None, None) if segments_BT is None else (segments_BT[:, start:end], segments_BT[:, keys])
        results.append(xla_attention.attention(q, k[:, keys].astype(k_BSGK.dtype), v[:, keys].astype(v_BSGK.dtype), own,
                                               window, soft_cap, sinks_H, theirs, start - first))
        start = end
    return jnp.concatenate(results, axis=1)


def ends(T: int, window: int = 0) -> list[int]:
    """Return where the blocks of the T queries of causal attention end."""
    count = max(1, min(T // SMALLEST, MOST if T >= LONG or 0 < window < T else USUAL))
    return [T * n // count for n in range(1, count + 1)]
