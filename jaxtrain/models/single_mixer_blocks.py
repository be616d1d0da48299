"""Layers of one thing each: a mixer of tokens, or an MLP or experts, behind a norm."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxtrain.base.annotations import PyTree
from jaxtrain.models.attention.kv_cache import Aux, Cache
from jaxtrain.models.decoder import Block
from jaxtrain.models.layers import INSIDE
from jaxtrain.sharding import activations


class MixerBlock(nnx.Module):
    """A residual block of attention, or what has its place, alone."""

    numbered = False

    def __init__(self, norm: Callable[[], nnx.Module], attention: Callable[[], Any], mlp: object = None):
        self.attention_norm, self.attention = norm(), attention()

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: PyTree,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        h = activations.enter(self.attention_norm(x_BTD), INSIDE, shared_by=self.attention.shared_by)
        y_BTD, aux = self.attention(h, segments_BT, angles, cache=cache)
        return x_BTD + y_BTD, aux


class FeedForwardBlock(Block):
    """A residual block of an MLP or experts alone."""

    numbered = False

    def __init__(self, norm: Callable[[], nnx.Module], attention: object, mlp: Callable[[], nnx.Module]):
        self.mlp_norm, self.mlp = norm(), mlp()

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: PyTree, *layer: jax.Array,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        y_BTD, aux = self.feed_forward(self.mlp_norm(x_BTD), segments_BT)
        return x_BTD + y_BTD, aux
