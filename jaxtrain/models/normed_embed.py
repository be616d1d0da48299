"""Token embeddings with a norm behind them."""

import jax
from flax import nnx

from jaxtrain.models.layers import Embed


class NormedEmbed(Embed):
    """Token embeddings, normalised."""

    def __init__(self, vocab: int, dim: int, norm: nnx.Module, *, rngs: nnx.Rngs):
        super().__init__(vocab, dim, rngs=rngs)
        self.norm = norm

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return self.norm(super().__call__(tokens_BT))
