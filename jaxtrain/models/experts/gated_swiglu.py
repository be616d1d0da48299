"""The shared expert of Qwen's mixtures: an MLP whose result each token takes a part of."""

import jax
from flax import nnx

from jaxtrain.kernels.functions import swiglu
from jaxtrain.models.layers import SwiGLU, param
from jaxtrain.sharding import activations


class GatedSwiGLU(SwiGLU):
    """Llama's MLP times the sigmoid of a logit of each token, which a vector makes of its activation."""

    def __init__(self, dim: int, hidden: int, *, out_std: float, rngs: nnx.Rngs):
        super().__init__(dim, hidden, out_std=out_std, rngs=rngs)
        self.token_gate = param(rngs, (dim, 1), ("embed", "router"))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        logit_BT1 = activations.einsum("btd,de->bte", activations.leave_reduced(x_BTD), self.token_gate[...],
                                       ("embed", "router"), ("batch", "seq", None))
        # Before `down`, which is linear: there the result is not yet a sum over devices.
        return self.down(swiglu(self.gate(x_BTD), self.up(x_BTD)) * jax.nn.sigmoid(logit_BT1))
