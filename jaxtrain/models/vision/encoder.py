"""A transformer whose tokens see all tokens of their segment: the body of encoders of images and of texts.

Shape suffixes: B batch, T sequence, D embedding.
"""

from functools import partial

import jax
from flax import nnx

from jaxtrain.config.remat_policies import policies
from jaxtrain.kernels.functions import gelu
from jaxtrain.kernels.gelus import exact_gelu, quick_gelu
from jaxtrain.models.attention.self_attention import Attention
from jaxtrain.models.decoder import Block, Compute
from jaxtrain.models.layers import INSIDE, GeluMLP, LayerNorm, Stack
from jaxtrain.models.rematerialization import cut
from jaxtrain.parallel.pipeline.stage_placement import Slots
from jaxtrain.sharding import activations

GELUS = {"tanh": gelu, "exact": exact_gelu, "quick": quick_gelu}  # by `model.gelu`


class Encoder(nnx.Module):
    """Pre-norm blocks with LayerNorm, GELU and biases, and a last norm."""

    def __init__(self, dim: int, layers: int, heads: int, mlp_dim: int, eps: float, *, compute: Compute,
                 rngs: nnx.Rngs, kind: str = "tanh", causal: bool = False):
        """Make it.

        Args:
            kind: of GELU.
            causal: tokens see only those before them, as in CLIP's encoder of texts.
        """
        out_std = 0.02 / (2 * layers) ** 0.5

        def block(rngs: nnx.Rngs) -> Block:
            return Block(partial(LayerNorm, dim, eps, rngs=rngs),
                         partial(Attention, dim, heads, heads, dim // heads, qkv_bias=True, out_bias=True,
                                 out_std=out_std, causal=causal, backend=compute.attention, context=compute.context,
                                 rngs=rngs),
                         partial(GeluMLP, dim, mlp_dim, out_std=out_std, rngs=rngs, kind=GELUS[kind]))

        remat = cut(policies(compute.remat, layers), 0, layers)
        self.blocks = Stack(block, layers, remat=remat, unroll=compute.unroll, rngs=rngs)
        self.norm = LayerNorm(dim, eps, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array) -> jax.Array:
        """Return the normalized activations."""
        return self.finish(self.through(x_BTD, segments_BT))

    # Both parts of a call; a pipeline runs them on different stages.
    def through(self, x_BTD: jax.Array, segments_BT: jax.Array, slots: Slots | None = None) -> jax.Array:
        """Apply all layers, or those in the `slots` of a stage."""
        return self.blocks(x_BTD, segments_BT, None, slots=slots)[0]

    def finish(self, x_BTD: jax.Array) -> jax.Array:
        """Apply the last norm."""
        return activations.constrain(self.norm(x_BTD), *INSIDE)
