"""A block whose attention and MLP read the same normalised activation, and are added at once."""

from collections.abc import Callable

import jax
from flax import nnx

from jaxtrain.base.annotations import PyTree
from jaxtrain.models.attention.kv_cache import Aux, Cache
from jaxtrain.models.attention.self_attention import Attention
from jaxtrain.models.decoder import Block
from jaxtrain.models.layers import INSIDE
from jaxtrain.sharding import activations


class ParallelBlock(Block):
    """A residual block with one norm, before attention and the MLP, which do not see each other."""

    def __init__(self, norm: Callable[[], nnx.Module], attention: Callable[[], Attention],
                 mlp: Callable[[], nnx.Module]):
        self.attention_norm, self.attention, self.mlp = norm(), attention(), mlp()

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: PyTree, *layer: jax.Array,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        h = activations.enter(self.attention_norm(x_BTD), INSIDE, shared_by=(*self.attention.shared_by, "act_mlp"))
        y_BTD, aux = self.attention(h, segments_BT, angles, *layer, cache=cache)
        return x_BTD + y_BTD + self.mlp(h), aux
