"""The layers of OLMo's models: norms after attention and the MLP, and of all heads together."""


import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.base.annotations import PyTree
from jaxtrain.kernels.functions import rms_norm
from jaxtrain.models.attention.kv_cache import Aux, Cache
from jaxtrain.models.decoder import Block
from jaxtrain.models.layers import INSIDE, param
from jaxtrain.sharding import activations


class PostNormBlock(Block):
    """A residual block, of which attention and the MLP are normalised before they are added, and read `x` itself."""

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: PyTree, *layer: jax.Array,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        h = activations.enter(x_BTD, INSIDE, shared_by=self.attention.shared_by)
        y_BTD, aux = self.attention(h, segments_BT, angles, *layer, cache=cache)
        x_BTD = checkpoint_name(x_BTD + self.attention_norm(y_BTD), "dots")
        y_BTD, routed = self.feed_forward(x_BTD, segments_BT)
        return x_BTD + self.mlp_norm(y_BTD), aux | routed


class AllHeadsRMSNorm(nnx.Module):
    """Root-mean-square normalisation in float32 over all heads together, with scale."""

    def __init__(self, heads: int, head_dim: int, eps: float, *, rngs: nnx.Rngs, axis: str = "heads"):
        """`axis`: "heads" of queries, "kv_heads" of keys."""
        self.eps, self.axes = eps, (axis, "head_dim")
        self.scale = param(rngs, (heads, head_dim), self.axes, std=0, value=1.0)

    def __call__(self, x_BTHK: jax.Array) -> jax.Array:
        scale_HK = activations.gather(self.scale[...], *self.axes)
        return activations.by_row(lambda x: rms_norm(x, scale_HK, self.eps), x_BTHK)
