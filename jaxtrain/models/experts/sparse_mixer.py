"""The choice of experts by SparseMixer-v2 (arXiv 2409.12136) as a model is used: one by one, each weighed on its own.

An expert's weight is a softmax over the experts whose logits are near its own, without those chosen before it. The
paper's training samples experts instead, and estimates the gradient of that.

Shape suffixes: B batch, T sequence, E experts, K experts of a token.
"""

import jax
import jax.numpy as jnp


def chosen(logits_BTE: jax.Array, count: int, jitter: float) -> tuple[jax.Array, jax.Array]:
    """Return the `count` experts [B, T, K] with the largest logits, best first, and their weights.

    `jitter`: logits are near if they are below by at most twice this, relative to the larger one's size.
    """
    left_BTE, experts, weights = logits_BTE, [], []
    for _ in range(count):
        top_BT1 = left_BTE.max(-1, keepdims=True)
        near_BTE = top_BT1 - logits_BTE <= 2 * jitter * jnp.maximum(jnp.abs(logits_BTE), top_BT1)
        expert_BT1 = left_BTE.argmax(-1, keepdims=True)
        shares_BTE = jax.nn.softmax(jnp.where(near_BTE, left_BTE, -jnp.inf))
        experts.append(expert_BT1)
        weights.append(jnp.take_along_axis(shares_BTE, expert_BT1, -1))
        left_BTE = jnp.where(jnp.arange(logits_BTE.shape[-1]) == expert_BT1, -jnp.inf, left_BTE)
    return jnp.concatenate(experts, -1), jnp.concatenate(weights, -1)
