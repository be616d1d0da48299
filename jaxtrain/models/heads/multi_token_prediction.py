"""Multi-token prediction of DeepSeek-V3 (arXiv 2412.19437): an extra layer that predicts the token after the next.

Its inputs are the decoder's activation for a token, before the last norm, and the embedding of the token that follows.
It shares the embedding and output head with the decoder. It is used in training only, as an additional signal, not in
evaluation or sampling.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.layers import INSIDE, RESIDUAL, Linear, RMSNorm
from jaxtrain.sharding import activations


class MTPHead(nnx.Module):
    """Normalizes, projects and adds both inputs, then applies a block like the decoder's last, and a norm."""

    def __init__(self, dim: int, eps: float, block: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs, *,
                 remat: Callable[[Callable], Callable] = lambda f: f):
        self.remat = remat
        self.norm_this, self.norm_next = (RMSNorm(dim, eps, rngs=rngs) for _ in range(2))
        # The published projection of the concatenated inputs, as its two halves.
        self.this, self.next = (Linear("btd,de->bte", (dim, dim), ("embed", "ahead"), RESIDUAL, rngs=rngs)
                                for _ in range(2))
        self.block = block(rngs)
        self.norm = RMSNorm(dim, eps, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, next_BTD: jax.Array, segments_BT: jax.Array | None,
                 angles: tuple[jax.Array, ...] | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the input of the output head, and the block's auxiliary values."""
        graphdef, weights = nnx.split(self.block)

        @self.remat
        def apply(x, weights):
            return nnx.merge(graphdef, weights)(x, segments_BT, angles)

        x_BTD = self.this(self.norm_this(x_BTD)) + self.next(self.norm_next(next_BTD))
        x_BTD, aux = apply(x_BTD, weights)
        return activations.constrain(self.norm(x_BTD), *INSIDE), aux


def with_second_targets(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Add to a batch the token after the next, with weight 0 past the end of the document or row."""
    def following(x_BT):
        return jnp.concatenate([x_BT[:, 1:], jnp.zeros_like(x_BT[:, :1])], 1)

    same_BT = batch["segments"] == following(batch["segments"])
    return batch | {"second_targets": following(batch["targets"]),
                    "second_weights": jnp.where(same_BT, following(batch["weights"]), 0)}
