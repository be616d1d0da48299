"""A vision transformer over packed patches: a row holds the patches of several pictures of any sizes.

Patches see those of their own picture only, and their positions are a vector for the row plus one for the column
within it, so that any height and width up to the largest can be met (NaViT, arXiv 2307.06304; ViT, arXiv 2010.11929).

Shape suffixes: B batch, T patches of a row, P values of a patch, D embedding.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.vision_keys import PictureConfig
from jaxtrain.models.decoder import Compute
from jaxtrain.models.layers import RESIDUAL, LearnedPositions, Linear
from jaxtrain.models.vision.encoder import Encoder
from jaxtrain.sharding import rules as sharding


class Vit(nnx.Module):
    """Patches to one vector each."""

    def __init__(self, c: PictureConfig, compute: Compute, *, rngs: nnx.Rngs):
        dim = c.picture_embed_dim
        self.embed = Linear("btp,pd->btd", (c.patch_values, dim), (None, "embed"), RESIDUAL, bias=True, rngs=rngs)
        self.down, self.across = (LearnedPositions(c.patches_per_side, dim, rngs=rngs) for _ in range(2))
        self.encoder = Encoder(dim, c.picture_layers, c.picture_heads, c.picture_mlp_dim, c.norm_eps, compute=compute,
                               rngs=rngs)

    def begin(self, values_BTP: jax.Array, places_BT2: jax.Array) -> jax.Array:
        """Return the embeddings of patches' values, which are about between -1 and 1, with those of their places."""
        down_BT, across_BT = (sharding.constrain(places_BT2[..., i].astype(jnp.int32), "batch", "seq") for i in (0, 1))
        values_BTP = sharding.constrain(values_BTP.astype(self.down.table[...].dtype), "batch", "seq", None)
        return self.embed(values_BTP) + self.down(down_BT) + self.across(across_BT)

    def __call__(self, patches_BTP: jax.Array, pictures_BT: jax.Array, places_BT2: jax.Array) -> jax.Array:
        """Return the normalized activation of each patch.

        Args:
            patches_BTP: 8-bit values.
            pictures_BT: the number of each patch's picture in the row, from 1 on; 0: padding.
            places_BT2: the row and the column of each patch in its picture.
        """
        pictures_BT = sharding.constrain(pictures_BT, "batch", "seq")
        return self.encoder(self.begin(patches_BTP.astype(jnp.float32) / 127.5 - 1, places_BT2), pictures_BT)
