"""Two encoders that agree on what belongs together: SigLIP (arXiv 2303.15343) and CLIP (arXiv 2103.00020).

A row holds several images and several texts; the n-th text of a row is that of its n-th image.

Shape suffixes: B batch, T sequence, S images of a row, P values of a patch, D embedding, E joint embedding.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.vision_keys import DualEncoderConfig
from jaxtrain.models.decoder import Compute
from jaxtrain.models.layers import RESIDUAL, Embed, LearnedPositions, Linear, param
from jaxtrain.models.vision import pooling
from jaxtrain.models.vision.encoder import Encoder
from jaxtrain.models.vision.vit import Vit
from jaxtrain.parallel.cut_rows import arrange
from jaxtrain.sharding import activations

if TYPE_CHECKING:
    from jaxtrain.parallel.pipeline.stage_placement import Slots

# The logarithm of the scale of similarities, and their bias, at first.
BEGINS = {"siglip": (math.log(10), -10.0), "clip": (math.log(1 / 0.07), 0.0)}
STACKS = ("image/encoder/blocks", "text/blocks")
Pair = tuple[jax.Array, jax.Array]  # of images and of texts


class DualEncoder(nnx.Module):
    """Images and texts to unit vectors of one width."""

    def __init__(self, c: DualEncoderConfig, compute: Compute, *, rngs: nnx.Rngs):
        wide, self.is_clip = c.image_embed_dim, c.name == "clip"
        self.image = Vit(c, compute, rngs=rngs)
        self.pool = (pooling.AttentionPool(wide, c.image_heads, c.image_mlp_dim, c.image_norm_eps, rngs=rngs,
                                           kind=c.gelu, projected=c.pooling == "probe")
                     if c.pooling in ("attention", "probe") else None)
        self.embed = Embed(c.vocab_size, c.embed_dim, rngs=rngs)
        self.positions = LearnedPositions(c.text_len, c.embed_dim, rngs=rngs)
        self.text = Encoder(c.embed_dim, c.num_layers, c.num_heads, c.mlp_dim, c.norm_eps, compute=compute, rngs=rngs,
                            kind=c.gelu, causal=self.is_clip)
        self.image_head, self.text_head = (
            Linear("btd,de->bte", (dim, c.joint_dim), ("embed", "ahead"), RESIDUAL, bias=c.projections != "unbiased",
                   rngs=rngs) if dim else None for dim in (0 if c.projections == "text" else wide, c.embed_dim))
        scale, bias = BEGINS[c.name]
        self.scale = param(rngs, (1,), (None,), std=0, value=scale, compute_dtype="float32")
        self.bias = None if self.is_clip else param(rngs, (1,), (None,), std=0, value=bias, compute_dtype="float32")

    def arranged(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return a batch as the devices that share a row share it."""
        tokens = {key: batch[key] for key in ("tokens", "segments", "positions")}
        split = {key: activations.constrain(x, "batch", "seq", *(None,) * (x.ndim - 2)) for key, x in batch.items()
                 if key in ("patches", "images", "places", *tokens)}
        # Causal attention takes tokens in the order that evens out its work.
        return dict(batch) | split | (arrange(tokens) if self.is_clip else {})

    # The three parts of a call; a pipeline runs them on different stages.
    def begin(self, batch: Mapping[str, jax.Array]) -> Pair:
        """Return the embeddings of patches and of tokens."""
        x_BTD = self.embed(batch["tokens"]) + self.positions(batch["positions"])
        return self.image.seen(batch["patches"], batch["images"], batch["places"]), x_BTD

    def through(self, x: Pair, batch: Mapping[str, jax.Array], slots: "Mapping[str, Slots] | None" = None) -> Pair:
        """Apply all layers of both encoders, or those in the `slots` of a stage."""
        own = [(slots or {}).get(path) for path in STACKS]
        return (self.image.encoder.through(x[0], batch["images"], own[0]),
                self.text.through(x[1], batch["segments"], own[1]))

    def finish(self, x: Pair, batch: Mapping[str, jax.Array]) -> Pair:
        """Return a unit vector for each image and each text, [B, S, E] with S for all of a row, in float32."""
        count = batch["weights"].shape[1]
        return (self._images(self.image.encoder.finish(x[0]), batch, count),
                self._texts(self.text.finish(x[1]), batch, count))

    def _images(self, x_BTD: jax.Array, batch: Mapping[str, jax.Array], count: int) -> jax.Array:
        images_BT, places_BT2 = batch["images"], batch["places"]
        if self.image.class_at is not None:
            x_BSD = pooling.chosen(x_BTD, images_BT, places_BT2[..., 0] == self.image.class_at, count)
        else:
            x_BSD = (self.pool or pooling.mean)(x_BTD, images_BT, count)
        return _unit(x_BSD if self.image_head is None else self.image_head(x_BSD))

    def _texts(self, x_BTD: jax.Array, batch: Mapping[str, jax.Array], count: int) -> jax.Array:
        assert self.text_head is not None
        return _unit(self.text_head(pooling.last(x_BTD, batch["segments"], batch["positions"], count)))

    def similarity(self) -> tuple[jax.Array, jax.Array]:
        """Return the scale and the bias of similarities."""
        scale = jnp.exp(self.scale[...][0])
        return scale, jnp.zeros_like(scale) if self.bias is None else self.bias[...][0]

    def __call__(self, batch: Mapping[str, jax.Array]) -> Pair:
        """Return the unit vectors of the images and of the texts, [B, S, E] each."""
        batch = self.arranged(batch)
        return self.finish(self.through(self.begin(batch), batch), batch)


def _unit(x_BSE: jax.Array) -> jax.Array:
    x_BSE = x_BSE.astype(jnp.float32)
    return x_BSE * jax.lax.rsqrt(jnp.maximum(jnp.square(x_BSE).sum(-1, keepdims=True), 1e-12))
