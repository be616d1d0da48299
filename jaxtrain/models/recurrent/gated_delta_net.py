"""Gated DeltaNet as the mixer of a layer (arXiv 2412.06464): short convolutions, the gated delta rule, a gated norm.

Shape suffixes: B batch, T sequence, D embedding, G groups of heads, H heads, K key width, V value width, W width of the
convolutions.
"""

import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.kernels.attention import HEADS, KV_HEADS
from jaxtrain.models.attention.kv_cache import CACHE, STATE, Aux, Cache
from jaxtrain.models.layers import RESIDUAL, Linear, RMSNorm, param
from jaxtrain.models.recurrent.gated_delta import gated_delta_rule, gated_delta_step
from jaxtrain.models.recurrent.short_convolution import convolved
from jaxtrain.sharding import activations

F32 = jnp.float32
Rule = Callable[..., tuple[jax.Array, jax.Array]]  # as `gated_delta_rule`
HEAD = ("batch", "seq", "act_heads")


class ShortConvolution(nnx.Module):
    """A short causal convolution of each channel of heads, and its activation."""

    def __init__(self, heads: int, head_dim: int, width: int, *, axis: str = "heads", bias: bool = False,
                 rngs: nnx.Rngs):
        """`axis`: "heads", "kv_heads" or "state_groups"."""
        self.axes, self.channels = (None, axis, "head_dim"), (f"act_{axis}", None)
        self.kernel = param(rngs, (width, heads, head_dim), self.axes, std=width**-0.5)
        self.bias = param(rngs, (heads, head_dim), self.axes[1:], std=0) if bias else None

    def __call__(self, x_BTHK: jax.Array, segments_BT: jax.Array | None,
                 state: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Return the result for a row, or with a state for one token after it, and the next state."""
        kernel = activations.gather(self.kernel[...], *self.axes)
        bias = None if self.bias is None else activations.gather(self.bias[...], *self.axes[1:])
        y_BTHK, last = convolved(x_BTHK, kernel, bias, segments_BT, state, channels=self.channels)
        return jax.nn.silu(y_BTHK), last


class Decay(nnx.Module):
    """The logarithm of the decay of states, from what a token says: -exp(rate of the head) softplus(x + bias)."""

    bound = 0.0  # of the logarithm from below, which is then bound sigmoid(exp(rate of the head) (x + bias)); 0: none

    def __init__(self, heads: int, *channels: int):
        """`channels`: how many of each head decay on their own; left out, a head decays as a whole."""
        # As in Mamba-2 (arXiv 2405.21060): rates in [1, 16], steps in [0.001, 0.1]; the same numbers on every mesh.
        size = math.prod((heads, *channels))
        steps = np.geomspace(1e-3, 1e-1, size)[np.random.default_rng(0).permutation(size)].reshape(heads, *channels)
        self.axes = ("heads", "head_dim")[:steps.ndim]
        self.rate = self._numbers(np.log(np.linspace(1, 16, heads)))
        self.bias = self._numbers(steps + np.log(-np.expm1(-steps)))

    def _numbers(self, values: np.ndarray) -> nnx.Param:
        return nnx.Param(jnp.asarray(values, F32), axes=self.axes[:values.ndim], compute_dtype="float32", update="")

    def rates(self) -> jax.Array:
        """Return the logarithm of the decay of each head's state in a step of 1."""
        rate_H = activations.gather(self.rate[...], "heads").astype(F32)
        return -jnp.exp(rate_H).reshape(-1, *(1,) * (len(self.axes) - 1))

    def steps(self, x_BTH: jax.Array) -> jax.Array:
        """Return the length of each token's step."""
        return jax.nn.softplus(self.biased(x_BTH))

    def biased(self, x_BTH: jax.Array) -> jax.Array:
        """Return what tokens say with the biases added, in float32."""
        return x_BTH.astype(F32) + activations.gather(self.bias[...], *self.axes).astype(F32)

    def __call__(self, x_BTH: jax.Array) -> jax.Array:
        if self.bound:
            return self.bound * jax.nn.sigmoid(-self.rates() * self.biased(x_BTH))
        return self.rates() * self.steps(x_BTH)


class GatedDeltaNet(nnx.Module):
    """The gated delta rule of convolved queries, keys and values, in place of attention."""

    shared_by = ("act_heads", "act_kv_heads")  # output dimensions of its first matmuls
    rule: ClassVar[Rule] = staticmethod(gated_delta_rule)
    one_token: ClassVar[Rule] = staticmethod(gated_delta_step)

    def __init__(self, dim: int, key_heads: int, heads: int, key_dim: int, value_dim: int, width: int, eps: float, *,
                 out_std: float, beta_factor: float = 1.0, kernel: str = "auto", rngs: nnx.Rngs):
        """Make the projections.

        Args:
            key_heads: of queries and keys, each for several consecutive heads.
            beta_factor: 2 lets the eigenvalues of a state's transition be negative (arXiv 2411.12537).
            kernel: train.recurrent_kernel.
        """
        self.kernel, self.beta_factor, wide = kernel, beta_factor, ("heads", "head_dim")
        keys = (dim, key_heads, key_dim), ("embed", "kv_heads", "head_dim"), KV_HEADS
        values = (dim, heads, value_dim), ("embed", *wide), HEADS
        self.q, self.k = (Linear("btd,dgk->btgk", *keys, rngs=rngs) for _ in range(2))
        self.v = Linear("btd,dhk->bthk", *values, rngs=rngs)
        self.beta = Linear("btd,dh->bth", (dim, heads), ("embed", "heads"), HEAD, rngs=rngs)
        self.q_conv, self.k_conv = (ShortConvolution(key_heads, key_dim, width, axis="kv_heads", rngs=rngs)
                                    for _ in range(2))
        self.v_conv = ShortConvolution(heads, value_dim, width, rngs=rngs)
        self.norm = RMSNorm(value_dim, eps, axis="head_dim", rngs=rngs)
        self.out = Linear("bthk,hkd->btd", (heads, value_dim, dim), (*wide, "embed"), RESIDUAL, std=out_std, rngs=rngs)
        self.make_gates(dim, heads, key_dim, value_dim, rngs)

    def make_gates(self, dim: int, heads: int, key_dim: int, value_dim: int, rngs: nnx.Rngs) -> None:
        """Make what decays and output gates are computed by."""
        self.step = Linear("btd,dh->bth", (dim, heads), ("embed", "heads"), HEAD, rngs=rngs)
        self.decay = Decay(heads)
        self.gate = Linear("btd,dhk->bthk", (dim, heads, value_dim), ("embed", "heads", "head_dim"), HEADS, rngs=rngs)

    def for_heads(self, x_BTD: jax.Array) -> jax.Array:
        """Return the input as the projections read it whose outputs are of heads."""
        return x_BTD

    def decays(self, x_BTD: jax.Array) -> jax.Array:
        """Return the logarithms of decays, in float32."""
        return self.decay(self.step(x_BTD))

    def gates(self, x_BTD: jax.Array) -> jax.Array:
        """Return what the normalized output is multiplied by, in float32."""
        return jax.nn.silu(self.gate(x_BTD).astype(F32))

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: object = None,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        held = {} if cache is None or cache.entries is None else cache.entries[STATE]
        new, h_BTD = {}, self.for_heads(x_BTD)
        q_BTGK, new["queries"] = self.q_conv(self.q(h_BTD), segments_BT, held.get("queries"))
        k_BTGK, new["keys"] = self.k_conv(self.k(h_BTD), segments_BT, held.get("keys"))
        v_BTHV, new["values"] = self.v_conv(self.v(h_BTD), segments_BT, held.get("values"))
        g_BTH = self.decays(x_BTD)
        beta_BTH = self.beta_factor * jax.nn.sigmoid(self.beta(h_BTD).astype(F32))
        q_BTGK, k_BTGK = l2_normalized(q_BTGK) * q_BTGK.shape[-1]**-0.5, l2_normalized(k_BTGK)
        if held:
            y_BTHV, new["state"] = self.one_token(q_BTGK, k_BTGK, v_BTHV, g_BTH, beta_BTH, held["state"])
        else:
            y_BTHV, new["state"] = self.rule(q_BTGK, k_BTGK, v_BTHV, g_BTH, beta_BTH, segments_BT, kernel=self.kernel)
        out = self.out((self.norm(y_BTHV) * self.gates(x_BTD)).astype(x_BTD.dtype))
        return out, {} if cache is None else {CACHE: {STATE: new}}


def l2_normalized(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Return vectors of length 1, in float32."""
    x = x.astype(F32)
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + eps)
