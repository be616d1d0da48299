"""The gated short convolution of LFM2 as the mixer of a layer: a convolution over time of a product, times a gate.

Shape suffixes: B batch, T sequence, D embedding, E channels of the convolution.
"""

import jax
from flax import nnx

from jaxtrain.models.attention.kv_cache import CACHE, STATE, Aux, Cache
from jaxtrain.models.layers import RESIDUAL, Linear, param
from jaxtrain.models.recurrent.short_convolution import convolved
from jaxtrain.sharding import activations

CHANNELS = "mlp"  # the logical axis of channels, which are neither heads nor the residual stream


class GatedConvolution(nnx.Module):
    """Three projections of a token: a gate of what is convolved, that itself, and a gate of the result."""

    shared_by = (f"act_{CHANNELS}",)  # output dimension of its first matmuls

    def __init__(self, dim: int, width: int, *, out_std: float, bias: bool = False, rngs: nnx.Rngs):
        """`bias`: whether the projections and the convolution have biases."""
        into = (dim, dim), ("embed", CHANNELS), ("batch", "seq", f"act_{CHANNELS}")
        self.before, self.after, self.x = (Linear("btd,de->bte", *into, bias=bias, rngs=rngs) for _ in range(3))
        self.kernel = param(rngs, (width, dim), (None, CHANNELS), std=width**-0.5)
        self.bias = param(rngs, (dim,), (CHANNELS,), std=0) if bias else None
        self.out = Linear("bte,ed->btd", (dim, dim), (CHANNELS, "embed"), RESIDUAL, bias=bias, std=out_std, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: object = None,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        kernel = activations.gather(self.kernel[...], None, CHANNELS)
        bias = None if self.bias is None else activations.gather(self.bias[...], CHANNELS)
        held = None if cache is None or cache.entries is None else cache.entries[STATE]["inputs"][:, :, 0]
        y_BTE, last = convolved(self.before(x_BTD) * self.x(x_BTD), kernel, bias, segments_BT, held,
                                channels=self.shared_by)
        out = self.out(self.after(x_BTD) * y_BTE)
        return out, {} if cache is None else {CACHE: {STATE: {"inputs": last[:, :, None]}}}
