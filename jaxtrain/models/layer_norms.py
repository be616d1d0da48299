"""LayerNorm in other forms: of each head of queries and keys, and with a scale that is added to 1."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.kernels.functions import layer_norm
from jaxtrain.models.layers import param
from jaxtrain.sharding import activations


class HeadLayerNorm(nnx.Module):
    """Mean and variance normalisation of each head in float32, times a scale of the head's own."""

    def __init__(self, heads: int, head_dim: int, eps: float, *, rngs: nnx.Rngs, axis: str = "heads"):
        """`axis`: "heads" of queries, "kv_heads" of keys."""
        self.eps, self.axes = eps, (axis, "head_dim")
        self.scale = param(rngs, (heads, head_dim), self.axes, std=0, value=1.0)

    def __call__(self, x_BTHK: jax.Array) -> jax.Array:
        scale_HK = activations.gather(self.scale[...], *self.axes).astype(jnp.float32)
        one_K, none_K = jnp.ones(x_BTHK.shape[-1]), jnp.zeros(x_BTHK.shape[-1])

        def scaled(x):
            return (layer_norm(x.astype(jnp.float32), one_K, none_K, self.eps) * scale_HK).astype(x.dtype)

        return activations.by_row(scaled, x_BTHK)


class ShiftedLayerNorm(nnx.Module):
    """Mean and variance normalisation in float32, times 1 + scale, plus bias."""

    def __init__(self, dim: int, eps: float, *, rngs: nnx.Rngs):
        self.eps = eps
        self.shift, self.bias = (param(rngs, (dim,), ("norm",), std=0) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        shift, bias = (activations.gather(p[...], "norm") for p in (self.shift, self.bias))
        return activations.by_row(lambda x: layer_norm(x, 1 + shift.astype(jnp.float32), bias, self.eps), x)
