"""Routed experts beside a dense MLP, each with norms of its own, as in Gemma 4."""

from functools import partial

import jax
from flax import nnx

from jaxtrain.config.model_config import ModelConfig
from jaxtrain.kernels.functions import gelu
from jaxtrain.models.experts.moe import MoE
from jaxtrain.models.layers import INSIDE, RMSNorm
from jaxtrain.models.sandwich_layers import GeGLU
from jaxtrain.parallel.expert_options import ExpertOptions
from jaxtrain.sharding import activations


def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return the tanh-GELU of the gate, times up."""
    return gelu(gate) * up


class NormedMoE(MoE):
    """Routed experts and a shared MLP, which are normalised before they are added."""

    def __init__(self, config: ModelConfig, *, out_std: float, options: ExpertOptions, rngs: nnx.Rngs):
        """Experts and the router read the activation that came into the layer, each with a norm of its own."""
        super().__init__(config, out_std=out_std, options=options, activation=geglu, shared=GeGLU, scaled=True,
                         rngs=rngs)
        norm = partial(RMSNorm, config.embed_dim, config.norm_eps, rngs=rngs)
        self.router_norm, self.experts_norm, self.experts_out_norm, self.shared_out_norm = (norm() for _ in range(4))

    def __call__(self, h_BTD: jax.Array, segments_BT: jax.Array | None,
                 x_BTD: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:  # pyrefly: ignore[bad-override]
        """Return what both add to a layer; `h_BTD` is what the dense MLP reads, of the activation `x_BTD`."""
        asked = self.router_norm(x_BTD)
        asked = (asked * x_BTD.shape[-1]**-0.5).astype(asked.dtype)
        y_BTD, aux = self.routed(asked, segments_BT, self.experts_norm(x_BTD))
        assert self.shared is not None
        shared = self.shared(activations.enter(h_BTD, INSIDE, shared_by=("act_mlp",)))
        return self.shared_out_norm(shared) + self.experts_out_norm(y_BTD), aux
