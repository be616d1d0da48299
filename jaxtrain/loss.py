"""Cross-entropy of a language-model head that never holds all logits.

Tokens pass through the head in chunks. When a gradient is wanted, each chunk's gradient is computed while its logits
are there: three matmuls in all, nothing computed twice, nothing of size tokens x vocabulary kept. The vocabulary may be
split over mesh axes; weight gradients are summed over the batch's devices once, after the last chunk.

Shape suffixes: B batch, T sequence, N tokens, D embedding, V vocabulary.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain import sharding

F32 = jnp.float32


@jax.named_scope("loss_head")  # where jaxtrain.bench looks for its time
def cross_entropy(x_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, *,
                  z_loss: float = 0.0, chunks: int = 0) -> jax.Array:
    """The sum over tokens of weight x (cross-entropy + z_loss x log-partition squared), in float32.

    A weight of 0 ignores a token. `chunks` is how many pieces the tokens on one device take; 0 chooses by size.
    """
    return _summed(x_BTD, head_DV, targets_BT, weights_BT, z_loss, chunks)


def default_chunks(tokens: int, vocab: int) -> int:
    """Few chunks where logits are small; else enough that one chunk's are under 2 % of all, but 256 tokens at least."""
    if tokens * vocab * 4 <= 2**26:
        return 1
    wanted = max(1, min(64, tokens // 256))
    above = next(n for n in range(wanted, tokens + 1) if tokens % n == 0)
    # Lengths with few divisors: rather larger chunks than a great many tiny ones.
    return above if above <= 4 * wanted else next(n for n in range(wanted, 0, -1) if tokens % n == 0)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _summed(x, head, targets, weights, z_loss, chunks):
    return _run(x, head, targets, weights, z_loss, chunks, gradients=False)[0]


def _forward(x, head, targets, weights, z_loss, chunks):
    loss, dx, dhead = _run(x, head, targets, weights, z_loss, chunks, gradients=True)
    return loss, (dx, dhead, jnp.zeros((), head.dtype))


def _backward(z_loss, chunks, saved, g):
    dx, dhead, head = saved
    return (g * dx).astype(dx.dtype), (g * dhead).astype(head.dtype), None, None


_summed.defvjp(_forward, _backward)


def _run(x, head, targets, weights, z_loss, chunks, gradients) -> Any:
    local = partial(_local, z_loss=z_loss, chunks=chunks, gradients=gradients)
    if sharding.activation_spec() is None:
        return local(x, head, targets, weights, (), ())
    batch, seq, vocab = map(sharding.split_by, ("batch", "seq", "act_vocab"))
    tokens, x_spec, head_spec = P(batch, seq), P(batch, seq, None), P(None, vocab)
    batch_axes = sharding.axes_of(batch) + sharding.axes_of(seq)
    return sharding.island(
        partial(local, batch_axes=batch_axes, vocab_axes=sharding.axes_of(vocab)),
        in_specs=(x_spec, head_spec, tokens, tokens),
        out_specs=(P(), x_spec, head_spec) if gradients else (P(),),
    )(x, head, targets, weights)


def _local(x_BTD, head_DV, targets_BT, weights_BT, batch_axes, vocab_axes, *, z_loss, chunks, gradients) -> Any:
    """One device's share: its tokens against its part of the vocabulary."""
    N, D, V = targets_BT.size, *head_DV.shape
    chunks = chunks or default_chunks(N, V)
    first = lax.axis_index(vocab_axes) * V if vocab_axes else 0
    over_vocab = partial(lax.psum, axis_name=vocab_axes) if vocab_axes else lambda value: value
    largest = partial(lax.pmax, axis_name=vocab_axes) if vocab_axes else lambda value: value
    over_batch = partial(lax.psum, axis_name=batch_axes) if batch_axes else lambda value: value

    def chunk(carry, inputs) -> Any:
        loss, dhead_DV = carry
        x_ND, target_N, weight_N = inputs
        logits_NV = jnp.dot(x_ND, head_DV, preferred_element_type=F32)
        top_N = largest(logits_NV.max(-1))
        lse_N = top_N + jnp.log(over_vocab(jnp.exp(logits_NV - top_N[:, None]).sum(-1)))
        hit_NV = (target_N - first)[:, None] == jnp.arange(V)
        correct_N = over_vocab(jnp.where(hit_NV, logits_NV, 0).sum(-1))
        loss += (weight_N * (lse_N - correct_N + z_loss * jnp.square(lse_N))).sum()
        if not gradients:
            return (loss, dhead_DV), None
        pull_N = weight_N * (1 + 2 * z_loss * lse_N)
        dlogits_NV = pull_N[:, None] * jnp.exp(logits_NV - lse_N[:, None]) - jnp.where(hit_NV, weight_N[:, None], 0)
        dlogits_NV = dlogits_NV.astype(x_ND.dtype)
        dx_ND = over_vocab(jnp.dot(dlogits_NV, head_DV.T, preferred_element_type=F32)).astype(x_ND.dtype)
        dhead_DV = dhead_DV + jnp.dot(x_ND.T, dlogits_NV, preferred_element_type=F32)
        return (loss, dhead_DV), dx_ND

    inputs = (x_BTD.reshape(chunks, -1, D), targets_BT.reshape(chunks, -1), weights_BT.reshape(chunks, -1))
    start: Any = (jnp.zeros((), F32), jnp.zeros((D, V), F32) if gradients else None)
    if chunks == 1:  # no loop: small models on CPU
        (loss, dhead_DV), dx = chunk(start, jax.tree.map(lambda a: a[0], inputs))
    else:
        (loss, dhead_DV), dx = lax.scan(chunk, start, inputs)
    if not gradients:
        return (over_batch(loss),)
    # A sum over tokens may be too large for float16 until the backward pass has divided it.
    dtype = F32 if head_DV.dtype == jnp.float16 else head_DV.dtype
    return over_batch(loss), dx.reshape(x_BTD.shape), over_batch(dhead_DV).astype(dtype)
