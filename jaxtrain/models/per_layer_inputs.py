"""An input of its own for each layer, made of the tokens and their embeddings, as in Gemma 3n and Gemma 4.

Shape suffixes: B batch, T sequence, D embedding, N layers, I width of a layer's input.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.base.annotations import PyTree
from jaxtrain.kernels.functions import gelu
from jaxtrain.models.attention.kv_cache import Aux, Cache
from jaxtrain.models.decoder import Decoder
from jaxtrain.models.layers import RESIDUAL, Linear, RMSNorm
from jaxtrain.models.sandwich_layers import scaled_embed

INPUTS = "inputs"  # their name among what all layers are given


class PerLayerInputs(nnx.Module):
    """The inputs of layers: an embedding of the token for each, plus a projection of its plain one, over sqrt(2)."""

    def __init__(self, vocab: int, layers: int, width: int, dim: int, eps: float, *, rngs: nnx.Rngs):
        self.width, self.dim = width, dim
        self.embed = scaled_embed(vocab, layers * width, width, rngs=rngs)
        self.project = Linear("btd,dl->btl", (dim, layers * width), ("embed", "latent"), RESIDUAL, rngs=rngs)
        self.norm = RMSNorm(width, eps, axis="latent", rngs=rngs)

    def __call__(self, tokens_BT: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """Return the inputs of all layers, one after the other."""
        own = self.embed(tokens_BT)
        projected = (self.project(x_BTD) * x_BTD.shape[-1]**-0.5).astype(own.dtype)
        projected = self.norm(projected.reshape(*own.shape[:2], -1, self.width)).reshape(own.shape)
        return ((projected + own) * math.sqrt(0.5)).astype(own.dtype)


class LayerInput(nnx.Module):
    """A projection of a layer's own input, gated by the activation."""

    def __init__(self, number: int, dim: int, width: int, eps: float, *, out_std: float, rngs: nnx.Rngs):
        """`number`: of the layer."""
        self.number, self.width = number, width
        self.gate = Linear("btd,dl->btl", (dim, width), ("embed", "latent"), RESIDUAL, rngs=rngs)
        self.out = Linear("btl,ld->btd", (width, dim), ("latent", "embed"), RESIDUAL, std=out_std, rngs=rngs)
        self.norm = RMSNorm(dim, eps, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, given: PyTree) -> jax.Array:
        """Return what is added to the activation, of what all layers are given."""
        input_BTI = given[INPUTS][..., self.number * self.width:][..., :self.width]
        return self.norm(self.out(gelu(self.gate(x_BTD)) * input_BTI))


class PerLayerDecoder(Decoder):
    """A decoder whose layers may have inputs of their own: from part to part they go behind the activation."""

    def __init__(self, *parts: Any, inputs: PerLayerInputs | None = None, **how: Any):
        super().__init__(*parts, **how)
        self.inputs = inputs

    def begin(self, tokens_BT: jax.Array, positions_BT: jax.Array,
              noise: Mapping[str, jax.Array] = MappingProxyType({})) -> jax.Array:
        """Return the embeddings, and behind them the inputs of all layers, which noise reaches through embeddings."""
        x_BTD = super().begin(tokens_BT, positions_BT, noise)
        return x_BTD if self.inputs is None else jnp.concatenate([x_BTD, self.inputs(tokens_BT, x_BTD)], -1)

    def through(self, x_BTD: jax.Array, segments_BT: jax.Array | None, positions_BT: jax.Array,
                slots: Any = None, cache: Cache | None = None, given: PyTree = None) -> tuple[jax.Array, Aux]:
        """Apply all layers to an activation that has the inputs of layers behind it, and leave them there."""
        if self.inputs is None:
            return super().through(x_BTD, segments_BT, positions_BT, slots, cache, given)
        x_BTD, inputs = jnp.split(x_BTD, [self.inputs.dim], -1)
        x_BTD, aux = super().through(x_BTD, segments_BT, positions_BT, slots, cache, {INPUTS: inputs})
        return jnp.concatenate([x_BTD, inputs], -1), aux

    def finish(self, x_BTD: jax.Array) -> jax.Array:
        """Apply the last norm to the activation alone."""
        return super().finish(x_BTD if self.inputs is None else x_BTD[..., :self.inputs.dim])
