"""An MLP without a gate, whose activation is xIELU (arXiv 2411.13010)."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.layers import RESIDUAL, Linear, param
from jaxtrain.sharding import activations


class XIELU(nnx.Module):
    """x squared times a trained number, where x is positive, and a trained number of times e^x - 1 - x, where not.

    `beta` times x is added to both. Like the point `eps`, from which e^x is flat, it is a number that nobody trains.
    """

    def __init__(self, *, rngs: nnx.Rngs):
        self.positive = param(rngs, (1,), (None,), std=0, value=0.203, compute_dtype="float32")  # softplus: 0.8
        self.negative = param(rngs, (1,), (None,), std=0, value=-1.05, compute_dtype="float32")  # softplus: 0.3
        self.beta = param(rngs, (), (), std=0, value=0.5, compute_dtype="float32")
        self.eps = param(rngs, (), (), std=0, value=-1e-6, compute_dtype="float32")

    def __call__(self, x: jax.Array) -> jax.Array:
        positive, negative = (jax.nn.softplus(activations.gather(p[...], None)[0])
                              for p in (self.positive, self.negative))
        beta, eps = (jax.lax.stop_gradient(p[...]) for p in (self.beta, self.eps))
        y = x.astype(jnp.float32)
        above = positive * y * y
        below = (jnp.expm1(jnp.minimum(y, eps)) - y) * (beta + negative)
        return (jnp.where(y > 0, above, below) + beta * y).astype(x.dtype)


class XieluMLP(nnx.Module):
    """Up, xIELU, down, without biases."""

    def __init__(self, dim: int, hidden: int, *, out_std: float, rngs: nnx.Rngs):
        self.up = Linear("btd,df->btf", (dim, hidden), ("embed", "mlp"), ("batch", "seq", "act_mlp"), rngs=rngs)
        self.xielu = XIELU(rngs=rngs)
        self.down = Linear("btf,fd->btd", (hidden, dim), ("mlp", "embed"), RESIDUAL, std=out_std, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(self.xielu(self.up(x_BTD)))
