"""Pictures for a decoder: an encoder makes a vector of each patch, and a connector a token's embedding of it.

A patch takes a token's place in the row, so that pictures may be anywhere in it. Tokens see the patches before them.

Shape suffixes: B batch, T sequence, D embedding.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.vision_keys import PictureConfig
from jaxtrain.kernels.functions import gelu
from jaxtrain.models.decoder import Compute, Decoder
from jaxtrain.models.layers import INSIDE, RESIDUAL, Linear
from jaxtrain.models.vision.vit import Vit
from jaxtrain.sharding import activations, axis_rules


class Connector(nnx.Module):
    """An MLP of one hidden layer from the encoder's width to the decoder's (LLaVA-1.5, arXiv 2310.03744)."""

    def __init__(self, wide: int, dim: int, *, rngs: nnx.Rngs):
        hidden = ("batch", "seq", "act_mlp")
        self.up = Linear("btd,df->btf", (wide, dim), ("embed", "mlp"), hidden, bias=True, rngs=rngs)
        self.down = Linear("btf,fd->btd", (dim, dim), ("mlp", "embed"), RESIDUAL, bias=True, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(gelu(self.up(activations.constrain(x_BTD, *INSIDE))))


def with_pictures(model: Any, c: PictureConfig, compute: Compute, *, rngs: nnx.Rngs) -> Decoder:
    """Return a decoder with a `picture` encoder and a `connector`."""
    model.picture = Vit(c, compute, rngs=rngs)
    model.connector = Connector(c.picture_embed_dim, c.embed_dim, rngs=rngs)
    for _, weight in nnx.iter_graph(model.picture):  # its layers are not a pipeline stage's own
        if isinstance(weight, nnx.Param):
            weight.set_metadata(axes=axis_rules.on_every_stage(weight.get_metadata()["axes"]))
    return model


def embedded(model: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Return the embeddings of the tokens of a batch, and those of patches in the places of patches."""
    text_BTD = model.begin(batch["tokens"], batch["positions"])
    seen_BTD = model.connector(model.picture(batch["patches"], batch["pictures"], batch["places"]))
    is_patch_BT1 = activations.constrain((batch["pictures"] > 0)[..., None], "batch", "block_seq", None)
    return jnp.where(is_patch_BT1, seen_BTD, text_BTD)


def logits(model: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Return the float32 logits of what follows each token, to look at and to sample from."""
    x_BTD, _ = model.through(embedded(model, batch), batch["segments"], batch["positions"])
    return model.logits(model.finish(x_BTD))
