"""Multi-token prediction of DeepSeek-V3 (arXiv 2412.19437): extra layers that predict the tokens after the next.

The inputs of the first are the decoder's activation for a token and the embedding of the token that follows; those of
each later one are what the one before returns, and the embedding of the token one place further. They share the
embedding and output head with the decoder. They are used in training only, as an additional signal, not in evaluation
or sampling.
"""

from collections.abc import Callable

import jax
from flax import nnx

from jaxtrain.models.layers import INSIDE, RESIDUAL, Linear
from jaxtrain.sharding import activations


class MTPHead(nnx.Module):
    """Normalizes, projects and adds both inputs, then applies a block like the decoder's last, and a norm."""

    def __init__(self, dim: int, norm: Callable[..., nnx.Module], block: Callable[[nnx.Rngs], nnx.Module],
                 rngs: nnx.Rngs, *, depth: int = 1, remat: Callable[[Callable], Callable] = lambda f: f):
        """Make a layer, and those that follow it where `depth` is more than 1."""
        self.remat = remat
        self.norm_this, self.norm_next = (norm(rngs=rngs) for _ in range(2))
        # The published projection of the concatenated inputs, as its two halves.
        self.this, self.next = (Linear("btd,de->bte", (dim, dim), ("embed", "ahead"), RESIDUAL, rngs=rngs)
                                for _ in range(2))
        self.block = block(rngs)
        self.norm = norm(rngs=rngs)
        self.later = MTPHead(dim, norm, block, rngs, depth=depth - 1, remat=remat) if depth > 1 else None

    def __call__(self, x_BTD: jax.Array, next_BTD: jax.Array, segments_BT: jax.Array | None,
                 angles: tuple[jax.Array, ...] | None) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Return the activation, its norm, which the output head reads, and the block's auxiliary values."""
        graphdef, weights = nnx.split(self.block)

        @self.remat
        def apply(x, weights):
            return nnx.merge(graphdef, weights)(x, segments_BT, angles)

        x_BTD = self.this(self.norm_this(x_BTD)) + self.next(self.norm_next(next_BTD))
        x_BTD, aux = apply(x_BTD, weights)
        return x_BTD, activations.constrain(self.norm(x_BTD), *INSIDE), aux
