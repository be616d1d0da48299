"""Short causal convolution over time, one kernel a channel, that begins anew at each document.

Where mesh axis `context` cuts rows, each part gathers only the last W-1 tokens of the part before it.

Shape suffixes: B batch, T sequence, W width of the kernel; x has any further dimensions, its channels.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxtrain.models.recurrent import sequence_parts as parts
from jaxtrain.sharding.axis_rules import Names

F32 = jnp.float32


def short_convolution(x_BT: jax.Array, kernel_W: jax.Array, bias: jax.Array | None = None,
                      segments_BT: jax.Array | None = None, state_BW: jax.Array | None = None, *,
                      channels: Names) -> tuple[jax.Array, jax.Array]:
    """Return y_t = bias + sum over w of kernel_w x_(t-W+1+w), within documents, and the last W-1 inputs.

    Args:
        x_BT: [B, T, ...channels].
        kernel_W: [W, ...channels]; the last is for the token itself.
        bias: [...channels].
        segments_BT: a change of them begins a document.
        state_BW: the W-1 inputs [B, W-1, ...channels] before the row, which its first document continues.
        channels: the logical activation axes of the channels, such as ("act_heads", None).
    """
    rows, before = (*parts.TOKENS, *channels), ("batch", None, *channels)
    return parts.on_own_rows(_convolve, (rows, (None, *channels), channels, parts.TOKENS, before), (rows, before))(
        x_BT, kernel_W, bias, segments_BT, state_BW)


@partial(jax.jit, static_argnums=0, inline=True)
@partial(jax.checkpoint, static_argnums=0)
def _convolve(n, x, kernel_W, bias, segments_BT, state_BW):
    width, rows = len(kernel_W), parts.apart(n, x.astype(F32))
    held = jnp.zeros((x.shape[0], width - 1, *x.shape[2:])) if state_BW is None else state_BW
    long, last = parts.with_tokens_before(n, rows, width - 1, held.astype(F32))
    starts, last_starts = parts.with_tokens_before(n, parts.document_starts(n, rows, segments_BT), width - 1,
                                                   jnp.zeros(held.shape[:2], bool))
    documents, last_documents = jnp.cumsum(starts, 1), jnp.cumsum(last_starts, 1)
    y = jnp.zeros_like(rows) if bias is None else jnp.broadcast_to(bias.astype(F32), rows.shape)
    for w in range(width):
        tokens = slice(w, w + rows.shape[1])
        y += kernel_W[w].astype(F32) * _visible(long, documents, tokens, documents[:, width - 1:])
    last = _visible(last, last_documents, slice(None), last_documents[:, -1:])
    return parts.together(n, y).astype(x.dtype), last.astype(x.dtype)


def _visible(x, documents, at, document):
    """Return the tokens of x in this place, 0 where they are of another document than the given one."""
    return x[:, at] * (documents[:, at] == document).reshape(len(x), -1, *(1,) * (x.ndim - 2))


def short_convolution_step(x_B1: jax.Array, kernel_W: jax.Array, bias: jax.Array | None, state_BW: jax.Array
                           ) -> tuple[jax.Array, jax.Array]:
    """Return `short_convolution` of one token [B, 1, ...channels], and its state after it."""
    long = jnp.concatenate([state_BW.astype(x_B1.dtype), x_B1], 1)
    y = (long.astype(F32) * kernel_W.astype(F32)).sum(1, keepdims=True)
    y = y if bias is None else y + bias.astype(F32)
    return y.astype(x_B1.dtype), long[:, 1:]


def convolved(x_BT: jax.Array, kernel_W: jax.Array, bias: jax.Array | None, segments_BT: jax.Array | None,
              state_BW: jax.Array | None, *, channels: Names) -> tuple[jax.Array, jax.Array]:
    """Return the convolution of a row, or with a state that of one token after it, and the next state."""
    if state_BW is None:
        return short_convolution(x_BT, kernel_W, bias, segments_BT, channels=channels)
    return short_convolution_step(x_BT, kernel_W, bias, state_BW)
