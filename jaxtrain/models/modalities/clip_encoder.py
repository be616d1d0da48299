"""Audio clips: a transformer over log-mel frames that looks both ways, and the label of their mean.

Shape suffixes: B clips, T frames, N bands, D embedding, L labels.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.modality_families import ClipsConfig
from jaxtrain.config.remat_policies import policies
from jaxtrain.models.attention.rotary import Rotary, frequencies
from jaxtrain.models.attention.self_attention import Attention
from jaxtrain.models.decoder import Block, Compute
from jaxtrain.models.layers import INSIDE, RESIDUAL, Linear, RMSNorm, Stack, SwiGLU, param
from jaxtrain.models.rematerialization import cut
from jaxtrain.parallel.cut_rows import whole_rows
from jaxtrain.parallel.pipeline.stage_placement import Slots
from jaxtrain.sharding import activations

BANDS = 80  # of the features of prepare_sequences audio


class ClipEncoder(nnx.Module):
    """Frames to the logits of a clip's labels."""

    def __init__(self, c: ClipsConfig, compute: Compute, *, rngs: nnx.Rngs):
        out_std = 0.02 / (2 * c.num_layers) ** 0.5
        norm = partial(RMSNorm, c.embed_dim, c.norm_eps)

        def block(rngs: nnx.Rngs) -> Block:
            attention = partial(Attention, c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim, out_std=out_std,
                                causal=False, backend=compute.attention, rngs=rngs)
            return Block(partial(norm, rngs=rngs), attention,
                         partial(SwiGLU, c.embed_dim, c.mlp_dim, out_std=out_std, rngs=rngs))

        self.project = Linear("btn,nd->btd", (BANDS, c.embed_dim), (None, "embed"), RESIDUAL, bias=True, rngs=rngs)
        self.blocks = Stack(block, c.num_layers, unroll=compute.unroll, rngs=rngs,
                            remat=cut(policies(compute.remat, c.num_layers), 0, c.num_layers))
        self.norm, self.rotary = norm(rngs=rngs), Rotary(frequencies(c.head_dim, c.rope_theta))
        self.labels = param(rngs, (c.embed_dim, c.labels), ("embed", None), compute_dtype="float32")

    def __call__(self, features_BTN: jax.Array, weights_BT: jax.Array) -> jax.Array:
        """Return float32 logits [B, L]; `weights_BT` is 0 in the padding."""
        positions_BT = jnp.broadcast_to(jnp.arange(weights_BT.shape[1]), weights_BT.shape)
        x_BTD = self.through(self.begin(features_BTN), weights_BT, positions_BT)
        return self.finish(x_BTD, weights_BT, weights_BT.sum(1))

    # The three parts of a call; a pipeline runs them on different stages.
    def begin(self, features_BTN: jax.Array) -> jax.Array:
        """Return the embeddings of frames."""
        return self.project(features_BTN.astype(self.project.kernel.dtype))

    def through(self, x_BTD: jax.Array, weights_BT: jax.Array, positions_BT: jax.Array,
                slots: Mapping[str, Slots] | None = None) -> jax.Array:
        """Apply all layers, or those in the `slots` of a stage, to frames at these positions of their clips."""
        angles = self.rotary.angles(activations.constrain(positions_BT, "batch", "seq"))
        return self.blocks(x_BTD, weights_BT > 0, angles, slots=(slots or {}).get("blocks"))[0]

    def finish(self, x_BTD: jax.Array, weights_BT: jax.Array, frames_B: jax.Array) -> jax.Array:
        """Return the logits of clips of this many frames from what the last layer returns, on all devices of a row."""
        x_BTD = activations.constrain(self.norm(x_BTD), *INSIDE)
        logits_BTL = activations.einsum("btd,dl->btl", x_BTD, self.labels[...], ("embed", None), ("batch", "seq", None))
        logits_BTL = whole_rows(logits_BTL * weights_BT[..., None], None)
        return logits_BTL.sum(1) / jnp.maximum(frames_B, 1)[:, None]
