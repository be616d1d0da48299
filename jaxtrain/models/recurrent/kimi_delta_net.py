"""Kimi delta attention as the mixer of a layer (arXiv 2510.26692): Gated DeltaNet whose key channels decay each alone.

Kimi Linear's decays and output gates come through a narrow projection, Ling 3.0's through whole matrices.

Shape suffixes: B batch, T sequence, D embedding, H heads, K key width, V value width.
"""

from typing import Any, ClassVar

import jax
from flax import nnx

from jaxtrain.kernels.attention import HEADS
from jaxtrain.models.attention.mla import LATENT
from jaxtrain.models.layers import INSIDE, Linear
from jaxtrain.models.recurrent.gated_delta_net import F32, Decay, GatedDeltaNet, Rule
from jaxtrain.models.recurrent.kimi_delta import kimi_delta_attention, kimi_delta_step
from jaxtrain.sharding import activations


class KimiDeltaNet(GatedDeltaNet):
    """Kimi delta attention, in place of attention; decays and output gates come through a narrow projection."""

    shared_by = ()  # the narrow projections are replicated on all devices that split the heads
    rule: ClassVar[Rule] = staticmethod(kimi_delta_attention)
    one_token: ClassVar[Rule] = staticmethod(kimi_delta_step)

    def make_gates(self, dim: int, heads: int, key_dim: int, value_dim: int, rngs: nnx.Rngs) -> None:
        """Make what decays and output gates are computed by."""
        up = ("rank", "heads", "head_dim")
        self.step_down, self.gate_down = (Linear(
            "btd,dl->btl", (dim, key_dim), ("embed", "latent"), LATENT, rngs=rngs) for _ in range(2))
        self.step = Linear("btl,lhk->bthk", (key_dim, heads, key_dim), up, HEADS, rngs=rngs)
        self.gate = Linear("btl,lhk->bthk", (key_dim, heads, value_dim), up, HEADS, rngs=rngs)
        self.decay = Decay(heads, key_dim)

    def for_heads(self, x_BTD: jax.Array) -> jax.Array:
        """Return the input as the projections read it whose outputs are of heads."""
        return activations.enter(x_BTD, INSIDE, shared_by=GatedDeltaNet.shared_by)

    def decays(self, x_BTD: jax.Array) -> jax.Array:
        """Return the logarithms of decays, in float32."""
        return self.decay(self.step(self.step_down(x_BTD)))

    def gates(self, x_BTD: jax.Array) -> jax.Array:
        """Return what the normalized output is multiplied by, in float32."""
        return jax.nn.sigmoid(self.gate(self.gate_down(x_BTD)).astype(F32))


class WholeKimiDeltaNet(GatedDeltaNet):
    """Kimi delta attention whose decays and output gates come through whole matrices; decays may have a bound."""

    rule: ClassVar[Rule] = staticmethod(kimi_delta_attention)
    one_token: ClassVar[Rule] = staticmethod(kimi_delta_step)

    def __init__(self, *sizes: Any, decay_bound: float = 0.0, out_std: float, kernel: str = "auto",
                 rngs: nnx.Rngs):
        """Make the projections of `GatedDeltaNet`'s sizes, with its `kernel`. `decay_bound`: see `Decay`."""
        super().__init__(*sizes, out_std=out_std, kernel=kernel, rngs=rngs)
        self.decay.bound = decay_bound

    def make_gates(self, dim: int, heads: int, key_dim: int, value_dim: int, rngs: nnx.Rngs) -> None:
        """Make what decays and output gates are computed by."""
        self.step, self.gate = (Linear("btd,dhk->bthk", (dim, heads, width), ("embed", "heads", "head_dim"), HEADS,
                                       rngs=rngs) for width in (key_dim, value_dim))
        self.decay = Decay(heads, key_dim)

    def gates(self, x_BTD: jax.Array) -> jax.Array:
        """Return what the normalized output is multiplied by, in float32."""
        return jax.nn.sigmoid(self.gate(x_BTD).astype(F32))
