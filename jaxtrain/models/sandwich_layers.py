"""The layers of Gemma's models: scaled embeddings, shifted norms, and local and global attention by turns.

All layers of a stack have parameters of the same shapes: a layer learns from its number whether it is local, with a
sliding window and the small rotary base, or global.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.decoder_config import DecoderConfig
from jaxtrain.kernels.functions import gelu, rms_norm
from jaxtrain.models.attention.attention_by_layer import attend_by_layer
from jaxtrain.models.attention.kv_cache import Aux, Cache, attend_cached, kept
from jaxtrain.models.attention.rotary import Rotary
from jaxtrain.models.attention.self_attention import Attention
from jaxtrain.models.decoder import Compute
from jaxtrain.models.layers import INSIDE, MultipliedEmbed, SwiGLU, param
from jaxtrain.sharding import activations

Angles = tuple[jax.Array, jax.Array]


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


class BothRotaries:
    """The rotary positions of local and of global layers."""

    def __init__(self, local: Rotary, everywhere: Rotary):
        self.local, self.everywhere = local, everywhere

    def angles(self, positions_BT: jax.Array) -> tuple[Angles, Angles]:
        """Return the angles of local layers, and those of global ones."""
        return self.local.angles(positions_BT), self.everywhere.angles(positions_BT)


class LocalOrGlobalAttention(Attention):
    """Grouped-query self-attention with normalised queries and keys; the number of the layer says whether it is local.
    """

    def __init__(self, c: DecoderConfig, compute: Compute, out_std: float, global_every: int, query_scale: int, *,
                 rngs: nnx.Rngs):
        """Divide scores by the square root of `query_scale`; every `global_every`-th layer is global."""
        super().__init__(c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim, out_std=out_std, window=c.window,
                         backend=compute.attention, context=compute.context, rngs=rngs,
                         qk_norm=partial(ShiftedRMSNorm, c.head_dim, c.norm_eps, axis="head_dim", rngs=rngs))
        self.global_every = global_every
        self.query_factor = math.sqrt(c.head_dim / query_scale)  # attention itself divides by sqrt(head_dim)

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: tuple[Angles, Angles],
                 layer: jax.Array, cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        q, k, v = self.project(x_BTD)
        everywhere = (layer + 1) % self.global_every == 0
        turn = jax.tree.map(lambda near, far: jnp.where(everywhere, far, near), *angles)
        q, k = Rotary.rotate(q, turn), Rotary.rotate(k, turn)
        if self.query_factor != 1:
            q = (q * self.query_factor).astype(q.dtype)
        if cache is not None and cache.entries is not None:
            return attend_cached(self.out, q, k, v, cache, jnp.where(everywhere, 0, self.window))
        out = attend_by_layer(everywhere, q, k, v, segments_BT=segments_BT, window=self.window, backend=self.backend,
                              context=self.context)
        return self.out(out), kept(cache, k, v)


class SandwichBlock(nnx.Module):
    """Attention, then an MLP; each is normalised before and after, and added to what came in."""

    def __init__(self, norm: Callable[[], nnx.Module], attention: Callable[[], Any], mlp: Callable[[], nnx.Module]):
        self.attention_norm, self.attention = norm(), attention()
        self.attention_out_norm, self.mlp_norm = norm(), norm()
        self.mlp, self.mlp_out_norm = mlp(), norm()

    def __call__(self, x_BTD: jax.Array, segments_BT, angles, *layer: jax.Array,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        """Apply the block; `layer` is its number, where attention reads it."""
        h = activations.enter(self.attention_norm(x_BTD), INSIDE, shared_by=self.attention.shared_by)
        h, aux = self.attention(h, segments_BT, angles, *layer, cache=cache)
        x_BTD = x_BTD + self.attention_out_norm(h)
        h = activations.enter(self.mlp_norm(x_BTD), INSIDE, shared_by=("act_mlp",))
        return x_BTD + self.mlp_out_norm(self.mlp(h)), aux
