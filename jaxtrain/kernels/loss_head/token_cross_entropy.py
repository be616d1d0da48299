"""The cross-entropy of each token, for losses that are not a weighted sum over tokens, without holding all logits.

Shape suffixes: B batch, T sequence, D embedding, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxtrain.kernels.loss_head.biased_heads import for_head
from jaxtrain.kernels.loss_head.cross_entropy import run_head


@jax.named_scope("loss_head")
def token_cross_entropy(x_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array, *, chunks: int = 0,
                        cap: float = 0.0, kernel: str = "auto") -> jax.Array:
    """Return each token's cross-entropy in float32.

    The backward pass computes the logits again: one matmul more than `cross_entropy` needs, which knows the weights.

    `cap` is the soft cap of logits; 0: none. `kernel` is as in `cross_entropy`.
    """
    return _by_token(for_head(x_BTD, head_DV), head_DV, targets_BT, chunks, cap, kernel)


@jax.named_scope("loss_head")
def cross_entropy_and_entropy(x_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array, *, chunks: int = 0,
                              cap: float = 0.0, kernel: str = "auto",
                              learnt: bool = True) -> tuple[jax.Array, jax.Array]:
    """Return each token's cross-entropy, and the entropy of the model's prediction there, from the same logits.

    Without `learnt`, the entropies have no gradient.
    """
    return _with_entropy(for_head(x_BTD, head_DV), head_DV, targets_BT, (), chunks, cap, kernel, learnt)


@jax.named_scope("loss_head")
def cross_entropy_and_draws(x_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array, keys: tuple[jax.Array, ...], *,
                            chunks: int = 0, cap: float = 0.0, kernel: str = "auto",
                            learnt: bool = True) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return what `cross_entropy_and_entropy` returns, and a token drawn from each prediction, all from one product.

    `keys`: the two words of each token's key of random numbers, and how many columns of the vocabulary are drawn from.
    """
    return _with_entropy(for_head(x_BTD, head_DV), head_DV, targets_BT, keys, chunks, cap, kernel, learnt)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _by_token(x, head, targets, chunks, cap, kernel):
    ones = jnp.ones_like(targets, jnp.float32)
    return run_head(x, head, targets, ones, (), (0.0, chunks, 0.0, 1.0, (cap, 0.0), kernel), gradients=False)[-1]


def _forward(x, head, targets, chunks, cap, kernel):
    return _by_token(x, head, targets, chunks, cap, kernel), (x, head, targets)


def _backward(chunks, cap, kernel, saved, g_BT):
    x, head, targets = saved
    _, dx, dhead, _ = run_head(x, head, targets, g_BT, (), (0.0, chunks, 0.0, 1.0, (cap, 0.0), kernel), gradients=True)
    return dx, dhead.astype(head.dtype), None


_by_token.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _with_entropy(x, head, targets, keys: tuple[jax.Array, ...], chunks, cap, kernel, learnt):
    ones, options = jnp.ones_like(targets, jnp.float32), (0.0, chunks, 0.0, 1.0, (cap, 0.0), kernel)
    return run_head(x, head, targets, ones, (), options, gradients=False, spread=(ones,), draws=keys)[1:]


def _forward_with_entropy(x, head, targets, keys: tuple[jax.Array, ...], chunks, cap, kernel, learnt):
    return _with_entropy(x, head, targets, keys, chunks, cap, kernel, learnt), (x, head, targets)


def _backward_with_entropy(chunks, cap, kernel, learnt, saved, pulls):
    x, head, targets = saved
    options = (0.0, chunks, 0.0, 1.0, (cap, 0.0), kernel)
    _, dx, dhead, _ = run_head(x, head, targets, pulls[0], (), options, gradients=True,
                               spread=pulls[1:2] if learnt else ())
    return dx, dhead.astype(head.dtype), None, None


_with_entropy.defvjp(_forward_with_entropy, _backward_with_entropy)
