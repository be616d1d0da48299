"""Mamba-2 as the mixer of a layer (arXiv 2405.21060): short convolutions, a state space model, a gated norm.

Shape suffixes: B batch, T sequence, D embedding, H heads, G groups of heads, P width of a head, N width of the state, W
width of the convolutions.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxtrain.kernels.attention import HEADS
from jaxtrain.models.attention.kv_cache import CACHE, STATE, Aux, Cache
from jaxtrain.models.layers import RESIDUAL, Linear, param
from jaxtrain.models.recurrent.gated_delta_net import HEAD, Decay, ShortConvolution
from jaxtrain.models.recurrent.state_space import state_space, state_space_step
from jaxtrain.sharding import activations

F32 = jnp.float32
GROUPS = ("batch", "seq", "act_state_groups", None)
PARTS = ("gate", "x", "B", "C", "dt")  # of what the published matrix makes of a token, in its order


class GatedNorm(nnx.Module):
    """Root-mean-square normalisation of each group of heads, in float32, after or before a gate."""

    def __init__(self, heads: int, head_dim: int, groups: int, eps: float, *, gate_first: bool, rngs: nnx.Rngs):
        self.groups, self.eps, self.gate_first = groups, eps, gate_first
        self.scale = param(rngs, (heads, head_dim), ("heads", "head_dim"), std=0, value=1.0)

    def __call__(self, y_BTHP: jax.Array, gate_BTHP: jax.Array) -> jax.Array:
        """Return the result, of which `gate_BTHP` is a factor."""
        y_BTHP = y_BTHP * gate_BTHP if self.gate_first else y_BTHP
        squares_BTH = self._means(jnp.square(y_BTHP).mean(-1))
        scale_HP = activations.gather(self.scale[...], "heads", "head_dim").astype(F32)
        y_BTHP = y_BTHP * lax.rsqrt(squares_BTH + self.eps)[..., None] * scale_HP
        return y_BTHP if self.gate_first else y_BTHP * gate_BTHP

    def _means(self, squares_BTH: jax.Array) -> jax.Array:
        """Return the mean over each head's group, whose heads may be on several devices."""
        B, T, H = squares_BTH.shape
        whole_BTH = activations.constrain(squares_BTH, "batch", "seq", None)
        spec = activations.activation_spec("batch", "seq", None, None)
        by_group = lax.reshape(whole_BTH, (B, T, self.groups, H // self.groups), out_sharding=spec)
        means = jnp.broadcast_to(by_group.mean(-1, keepdims=True), by_group.shape)
        spec = activations.activation_spec("batch", "seq", None)
        return activations.constrain(lax.reshape(means, (B, T, H), out_sharding=spec), *HEAD)


class Mamba2(nnx.Module):
    """A state space model of convolved inputs, in place of attention."""

    shared_by = ("act_heads",)  # output dimension of its first matmuls; those of groups are whole

    def __init__(self, dim: int, heads: int, head_dim: int, groups: int, state_dim: int, width: int, eps: float, *,
                 out_std: float, conv_bias: bool = True, bias: bool = False, out_bias: bool = False,
                 norm: str = "after_gate", steps: tuple[float, float] = (0.0, 0.0),
                 factors: tuple[float, ...] = (), kernel: str = "auto", rngs: nnx.Rngs):
        """Make the projections.

        Args:
            groups: of consecutive heads, which share B and C, and whose norm is one.
            bias: whether the first projections have biases; `out_bias`: whether the last one does.
            norm: "after_gate", "before_gate" or "none", which leaves the gate alone.
            steps: the least and the largest step; 0: without a limit.
            factors: of the input, and of each of `PARTS`; (): all are 1.
            kernel: train.recurrent_kernel.
        """
        self.kernel = kernel
        self.steps, self.factors = steps, dict(zip(("input", *PARTS), factors, strict=bool(factors)))
        by_head = (dim, heads, head_dim), ("embed", "heads", "head_dim"), HEADS
        by_group = (dim, groups, state_dim), ("embed", "state_groups", "head_dim"), GROUPS
        self.gate, self.x = (Linear("btd,dhp->bthp", *by_head, bias=bias, rngs=rngs) for _ in range(2))
        self.B, self.C = (Linear("btd,dgn->btgn", *by_group, bias=bias, rngs=rngs) for _ in range(2))
        self.dt = Linear("btd,dh->bth", (dim, heads), ("embed", "heads"), HEAD, bias=bias, rngs=rngs)
        self.x_conv = ShortConvolution(heads, head_dim, width, bias=conv_bias, rngs=rngs)
        self.B_conv, self.C_conv = (ShortConvolution(groups, state_dim, width, axis="state_groups", bias=conv_bias,
                                                     rngs=rngs) for _ in range(2))
        self.decay = Decay(heads)
        self.skip = param(rngs, (heads,), ("heads",), std=0, value=1.0, compute_dtype="float32")  # published as D
        self.norm = None if norm == "none" else GatedNorm(heads, head_dim, groups, eps,
                                                          gate_first=norm == "after_gate", rngs=rngs)
        self.out = Linear("bthp,hpd->btd", (heads, head_dim, dim), ("heads", "head_dim", "embed"), RESIDUAL,
                          bias=out_bias, std=out_std, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None, angles: object = None,
                 cache: Cache | None = None) -> tuple[jax.Array, Aux]:
        held = {} if cache is None or cache.entries is None else cache.entries[STATE]
        x_BTD, new = self._times("input", x_BTD), {}
        whole_BTD = activations.leave_reduced(x_BTD) if activations.split_by("act_state_groups") is None else x_BTD
        mixed = {}
        for name, given in (("x", x_BTD), ("B", whole_BTD), ("C", whole_BTD)):
            projected = self._times(name, getattr(self, name)(given))
            mixed[name], new[name] = getattr(self, f"{name}_conv")(projected, segments_BT, held.get(name))
        dt_BTH, rates_H = self._limited(self.decay.steps(self._times("dt", self.dt(x_BTD)))), self.decay.rates()
        inputs = mixed["x"], dt_BTH, rates_H, mixed["B"], mixed["C"]
        if held:
            y_BTHP, new["state"] = state_space_step(*inputs, held["state"])
        else:
            y_BTHP, new["state"] = state_space(*inputs, segments_BT, kernel=self.kernel)
        skip_H1 = activations.gather(self.skip[...], "heads").astype(F32)[:, None]
        y_BTHP = y_BTHP.astype(F32) + skip_H1 * mixed["x"].astype(F32)
        gate_BTHP = jax.nn.silu(self._times("gate", self.gate(x_BTD)).astype(F32))
        y_BTHP = y_BTHP * gate_BTHP if self.norm is None else self.norm(y_BTHP, gate_BTHP)
        return self.out(y_BTHP.astype(x_BTD.dtype)), {} if cache is None else {CACHE: {STATE: new}}

    def _times(self, name: str, x: jax.Array) -> jax.Array:
        factor = self.factors.get(name, 1)
        return x if factor == 1 else (x * factor).astype(x.dtype)

    def _limited(self, dt_BTH: jax.Array) -> jax.Array:
        least, largest = self.steps
        dt_BTH = jnp.maximum(dt_BTH, least) if least else dt_BTH
        return jnp.minimum(dt_BTH, largest) if largest else dt_BTH
