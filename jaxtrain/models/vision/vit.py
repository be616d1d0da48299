"""A vision transformer over packed patches: a row holds the patches of several images of any sizes.

Patches see those of their own image only. Their positions are a vector for the row plus one for the column within
it, so that any height and width up to the largest can be met (NaViT, arXiv 2307.06304; ViT, arXiv 2010.11929); or, as
in published encoders, the values at their places of a table that is stretched over the image.

Shape suffixes: B batch, T patches of a row, S images of a row, P values of a patch, D embedding, N places of the
table.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config.vision_keys import ImageConfig
from jaxtrain.models.decoder import Compute
from jaxtrain.models.layers import INSIDE, RESIDUAL, LayerNorm, LearnedPositions, Linear, param
from jaxtrain.models.vision.encoder import Encoder
from jaxtrain.parallel.cut_rows import whole_rows
from jaxtrain.sharding import activations


class Grid(nnx.Module):
    """A table of positions of square images, between whose places cubic curves are drawn for all others."""

    def __init__(self, c: ImageConfig, *, rngs: nnx.Rngs):
        self.side, self.count, self.class_at = c.grid, c.images_per_row, c.class_at
        self.table = param(rngs, (c.grid**2 + c.class_token, c.image_embed_dim), ("positions", "embed"), std=0.01)

    def __call__(self, places_BT2: jax.Array, images_BT: jax.Array) -> jax.Array:
        """Return the position of each patch."""
        sizes_BT2 = self._sizes(places_BT2, images_BT)
        down_BTR, across_BTC = (_cubic(places_BT2[..., i], sizes_BT2[..., i], self.side) for i in (0, 1))
        weights_BTN = (down_BTR[..., :, None] * across_BTC[..., None, :]).reshape(*places_BT2.shape[:2], -1)
        if self.class_at is not None:
            is_class_BT1 = (places_BT2[..., :1] == self.class_at).astype(jnp.float32)
            weights_BTN = jnp.concatenate([is_class_BT1, weights_BTN * (1 - is_class_BT1)], -1)
        table = activations.gather(self.table[...], "positions", "embed")
        x_BTD = jnp.einsum("btn,nd->btd", weights_BTN, table.astype(jnp.float32), precision="highest",
                           out_sharding=activations.activation_spec(*INSIDE))
        return activations.constrain(x_BTD.astype(table.dtype), *RESIDUAL)

    def _sizes(self, places_BT2: jax.Array, images_BT: jax.Array) -> jax.Array:
        """Return how many patches high and wide each patch's image is."""
        numbers_S = jnp.arange(1, self.count + 1)
        places_BT2 = places_BT2 + 1 if self.class_at is None else jnp.where(
            places_BT2[..., :1] == self.class_at, 0, places_BT2 + 1)
        own_BTS1 = (whole_rows(images_BT)[..., None] == numbers_S)[..., None]
        largest_BS2 = jnp.where(own_BTS1, whole_rows(places_BT2, None)[:, :, None], 0).max(1)
        own_BTS = (images_BT[..., None] == numbers_S).astype(jnp.float32)
        return jnp.einsum("bts,bsi->bti", own_BTS, largest_BS2.astype(jnp.float32), precision="highest")


def _cubic(at_BT: jax.Array, size_BT: jax.Array, side: int) -> jax.Array:
    """Return the weights [B, T, side] of a table's places for the at-th of `size` places that are spread over them.

    They are those of cubic convolution (Keys, 1981) with the parameter -0.75; the table goes on behind its ends as it
    ends.
    """
    x_BT = (at_BT.astype(jnp.float32) + 0.5) * side / jnp.maximum(size_BT, 1) - 0.5
    first_BT, found = jnp.floor(x_BT), 0.0
    for n in range(-1, 3):
        away_BT = jnp.abs(x_BT - first_BT - n)
        near_BT = (1.25 * away_BT - 2.25) * away_BT**2 + 1
        far_BT = ((-0.75 * away_BT + 3.75) * away_BT - 6) * away_BT + 3
        hit_BTN = jnp.clip(first_BT + n, 0, side - 1)[..., None] == jnp.arange(side)
        found += jnp.where(away_BT <= 1, near_BT, far_BT)[..., None] * hit_BTN
    return jnp.asarray(found)


class Vit(nnx.Module):
    """Patches to one vector each."""

    def __init__(self, c: ImageConfig, compute: Compute, *, rngs: nnx.Rngs):
        dim = c.image_embed_dim
        self.class_at = c.class_at
        self.mean, self.std = (tuple(255 * x for x in each) for each in (c.pixel_mean, c.pixel_std))  # of each channel
        self.embed = Linear("btp,pd->btd", (c.patch_values, dim), (None, "embed"), RESIDUAL, bias=not c.class_token,
                            rngs=rngs)
        self.grid = Grid(c, rngs=rngs) if c.grid else None
        self.down, self.across = (None if c.grid else LearnedPositions(c.patches_per_side, dim, rngs=rngs)
                                  for _ in range(2))
        self.token = param(rngs, (dim,), ("embed",)) if c.class_token else None
        self.first_norm = LayerNorm(dim, c.image_norm_eps, rngs=rngs) if c.class_token else None
        self.encoder = Encoder(dim, c.image_layers, c.image_heads, c.image_mlp_dim, c.image_norm_eps,
                               compute=compute, rngs=rngs, kind=c.gelu)

    def begin(self, values_BTP: jax.Array, places_BT2: jax.Array, images_BT: jax.Array) -> jax.Array:
        """Return the embeddings of patches' values, which are about between -1 and 1, with those of their places."""
        places_BT2 = activations.constrain(places_BT2.astype(jnp.int32), "batch", "seq", None)
        values_BTP = activations.constrain(values_BTP, "batch", "seq", None)
        if self.grid is None:
            assert self.down is not None and self.across is not None
            x_BTD = self.embed(values_BTP.astype(self.down.table[...].dtype))
            return x_BTD + self.down(places_BT2[..., 0]) + self.across(places_BT2[..., 1])
        x_BTD = self.embed(values_BTP.astype(self.grid.table[...].dtype))
        if self.token is None or self.first_norm is None or self.class_at is None:
            return x_BTD + self.grid(places_BT2, images_BT)
        is_class_BT1 = activations.constrain(places_BT2[..., :1] == self.class_at, "batch", "block_seq", None)
        token_BTD = activations.constrain(jnp.broadcast_to(activations.gather(self.token[...], "embed"), x_BTD.shape),
                                       *RESIDUAL)
        return self.first_norm(jnp.where(is_class_BT1, token_BTD, x_BTD) + self.grid(places_BT2, images_BT))

    def __call__(self, patches_BTP: jax.Array, images_BT: jax.Array, places_BT2: jax.Array) -> jax.Array:
        """Return the normalized activation of each patch; what is given is that of `seen`."""
        images_BT = activations.constrain(images_BT, "batch", "seq")
        return self.encoder(self.seen(patches_BTP, images_BT, places_BT2), images_BT)

    def seen(self, patches_BTP: jax.Array, images_BT: jax.Array, places_BT2: jax.Array) -> jax.Array:
        """Return the embedding of each patch.

        Args:
            patches_BTP: 8-bit values.
            images_BT: the number of each patch's image in the row, from 1 on; 0: padding.
            places_BT2: the row and the column of each patch in its image.
        """
        images_BT, x_BTP = activations.constrain(images_BT, "batch", "seq"), patches_BTP.astype(jnp.float32)
        mean_P, std_P = (np.tile(np.array(x, np.float32), x_BTP.shape[-1] // len(x)) for x in (self.mean, self.std))
        x_BTP = x_BTP / 127.5 - 1 if {*self.mean, *self.std} == {127.5} else (x_BTP - mean_P) / std_P
        return self.begin(x_BTP, places_BT2, images_BT)
