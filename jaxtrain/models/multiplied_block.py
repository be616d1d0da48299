"""A block whose branches are multiplied before they are added."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.base.annotations import PyTree
from jaxtrain.models.attention.kv_cache import Aux, Cache
from jaxtrain.models.decoder import Block
from jaxtrain.models.layers import INSIDE
from jaxtrain.sharding import activations


class MultipliedBlock(Block):
    """A pre-norm residual block, of which attention and the MLP or experts are multiplied by `factor`."""

    def __init__(self, factor: float, *parts: Callable[[], Any]):
        super().__init__(*parts)
        self.factor = factor

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: PyTree, *layer: jax.Array,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        h = activations.enter(self.attention_norm(x_BTD), INSIDE, shared_by=self.attention.shared_by)
        y_BTD, aux = self.attention(h, segments_BT, angles, *layer, cache=cache)
        x_BTD = checkpoint_name(x_BTD + (y_BTD * self.factor).astype(x_BTD.dtype), "dots")
        y_BTD, routed = self.feed_forward(self.mlp_norm(x_BTD), segments_BT)
        return x_BTD + (y_BTD * self.factor).astype(x_BTD.dtype), aux | routed
