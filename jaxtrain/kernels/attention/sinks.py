"""Attention sinks: one learned score for each head, of a key that every query sees and that has no value.

Softmax normalises over the sink, too, so that a head can attend to less than all (gpt-oss, arXiv 2508.10925). A kernel
without sinks that returns the logarithm of its normalizer (`lse`) needs no other code: the output shrinks by what the
sink adds to the normalizer, and its backward kernel is right once it is given the output and `lse` with sinks.

Shape suffixes: B batch, T sequence, H query heads, G key/value heads, N queries of a group, S keys, K head width.
"""

import jax
import jax.numpy as jnp

F32 = jnp.float32


def added(out_BTHK: jax.Array, lse_BTH: jax.Array, sinks_H: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the output and `lse` of attention with sinks, in float32, from those without."""
    total_BTH = jnp.logaddexp(lse_BTH, sinks_H.astype(F32))
    return out_BTHK * jnp.exp(lse_BTH - total_BTH)[..., None], total_BTH


def gradient(sinks_H: jax.Array, lse_BTH: jax.Array, delta_BTH: jax.Array) -> jax.Array:
    """Return the gradient of sinks; `lse` is that with sinks, and `delta` the sum over K of the output x its gradient.
    """
    return -(jnp.exp(sinks_H.astype(F32) - lse_BTH) * delta_BTH).sum((0, 1)).astype(sinks_H.dtype)


def by_query(sinks_H: jax.Array, G: int, T: int) -> jax.Array:
    """Return the sink of every query of the G groups, each of which has T queries of each of its heads."""
    sinks_1GR11 = sinks_H.astype(F32).reshape(G, -1)[None, :, :, None, None]
    return jnp.broadcast_to(sinks_1GR11, (*sinks_1GR11.shape[:3], T, 1)).reshape(1, G, -1, 1)


@jax.custom_vjp
def softmax(scores_BGNS: jax.Array, sinks_1GN1: jax.Array) -> jax.Array:
    """Return the softmax over keys and sink, without the sink's weight."""
    return _softmax_forward(scores_BGNS, sinks_1GN1)[0]


def _softmax_forward(scores_BGNS, sinks_1GN1):
    top = jnp.maximum(scores_BGNS.max(-1, keepdims=True), sinks_1GN1)
    e, sink = jnp.exp(scores_BGNS - top), jnp.exp(sinks_1GN1 - top)
    scale = 1 / (e.sum(-1, keepdims=True) + sink)
    weights = e * scale
    return weights, (weights, sink * scale)


def _softmax_backward(saved, pull):
    weights, sink_BGN1 = saved
    with jax.named_scope("attention"):  # in a loop over layers it would lose the scope of the forward pass
        delta = (weights * pull).sum(-1, keepdims=True)
        return weights * (pull - delta), -(sink_BGN1 * delta).sum(0, keepdims=True)


softmax.defvjp(_softmax_forward, _softmax_backward)
