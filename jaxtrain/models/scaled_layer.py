"""The layer of Gemma 4: norms before and after attention and the MLP, and a number by which all is multiplied."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.base.annotations import PyTree
from jaxtrain.models.attention.kv_cache import Aux, Cache
from jaxtrain.models.layers import INSIDE
from jaxtrain.models.sandwich_layers import SandwichBlock
from jaxtrain.sharding import activations


class ScaledLayer(SandwichBlock):
    """Attention, an MLP with experts or without, and what the layer makes of an input of its own; then a factor."""

    def __init__(self, norm: Callable[[], nnx.Module], attention: Callable[[], Any], mlp: Callable[[], nnx.Module],
                 own_input: Callable[[], nnx.Module] | None = None):
        super().__init__(norm, attention, mlp)
        self.own_input = own_input() if own_input else None
        self.factor = nnx.Param(jnp.ones(1), axes=(None,), compute_dtype="", update="")

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: PyTree, *layer: jax.Array,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        h = activations.enter(self.attention_norm(x_BTD), INSIDE, shared_by=self.attention.shared_by)
        h, aux = self.attention(h, segments_BT, angles, *layer, cache=cache)
        x_BTD = x_BTD + self.attention_out_norm(h)
        h = self.mlp_norm(x_BTD)
        if getattr(self.mlp, "routes", False):
            h, routed = self.mlp(h, segments_BT, x_BTD)
        else:
            h, routed = self.feed_forward(h, segments_BT)
        x_BTD = x_BTD + self.mlp_out_norm(h)
        if self.own_input is not None:
            x_BTD = x_BTD + self.own_input(x_BTD, angles)
        return (x_BTD * self.factor[...]).astype(x_BTD.dtype), aux | routed
