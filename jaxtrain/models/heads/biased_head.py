"""An output projection with a bias of each token."""

import jax
from flax import nnx

from jaxtrain.kernels.loss_head.biased_heads import with_bias_rows
from jaxtrain.models.layers import Head, param


class BiasedHead(Head):
    """A separate output projection and its bias."""

    def __init__(self, vocab: int, dim: int, *, rngs: nnx.Rngs):
        super().__init__(vocab, dim, rngs=rngs)
        self.bias = param(rngs, (vocab,), ("vocab",), std=0)

    def head(self) -> jax.Array:
        """Return w_EV: the matrix, and the rows of the bias."""
        return with_bias_rows(self.kernel[...], self.bias[...])
