"""The layers of Gemma's models: scaled embeddings, shifted norms, and norms before and after attention and the MLP."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.base.annotations import PyTree
from jaxtrain.kernels.functions import gelu, rms_norm
from jaxtrain.models.attention.kv_cache import Aux, Cache
from jaxtrain.models.decoder import Block
from jaxtrain.models.layers import INSIDE, MultipliedEmbed, SwiGLU, param
from jaxtrain.sharding import activations


def scaled_embed(vocab: int, dim: int, base: int = 0, *, rngs: nnx.Rngs) -> MultipliedEmbed:
    """Return token embeddings times the square root of their width.

    `base`: the width in place of theirs, where `mup_base` says that activations are to be as large as in that width.
    """
    return MultipliedEmbed(vocab, dim, math.sqrt(base or dim), rngs=rngs)


class ShiftedRMSNorm(nnx.Module):
    """Root-mean-square normalisation in float32, times 1 + scale: a scale that decays to 0 leaves the norm alone."""

    def __init__(self, dim: int, eps: float, *, rngs: nnx.Rngs, axis: str = "norm"):
        self.eps, self.axis = eps, axis
        self.scale = param(rngs, (dim,), (axis,), std=0)

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = 1 + activations.gather(self.scale[...], self.axis).astype(jnp.float32)
        return activations.by_row(lambda x: rms_norm(x, scale, self.eps), x)


class GeGLU(SwiGLU):
    """The tanh-GELU of a gate times up, then down, without biases."""

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(gelu(self.gate(x_BTD)) * self.up(x_BTD))


class SandwichBlock(Block):
    """Attention, then an MLP; each is normalised before and after, and added to what came in."""

    def __init__(self, norm: Callable[[], nnx.Module], attention: Callable[[], Any], mlp: Callable[[], nnx.Module]):
        super().__init__(norm, attention, mlp)
        self.attention_out_norm, self.mlp_out_norm = norm(), norm()

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: PyTree, *layer: jax.Array,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        h = activations.enter(self.attention_norm(x_BTD), INSIDE, shared_by=self.attention.shared_by)
        h, aux = self.attention(h, segments_BT, angles, *layer, cache=cache)
        x_BTD = x_BTD + self.attention_out_norm(h)
        h, routed = self.feed_forward(self.mlp_norm(x_BTD), segments_BT)
        return x_BTD + self.mlp_out_norm(h), aux | routed
