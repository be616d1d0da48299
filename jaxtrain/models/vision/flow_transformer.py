"""The velocity of each patch on its way from noise to an image, given the time and the image's label.

A vision transformer over noisy patches; what depends on the time and the label is added to the embeddings (DiT, arXiv
2212.09748, has it in every norm).

Shape suffixes: B batch, T patches, S images of a row, P values of a patch, D embedding, F frequencies.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config.vision_keys import ImageFlowConfig
from jaxtrain.models.decoder import Compute
from jaxtrain.models.layers import RESIDUAL, Linear, param
from jaxtrain.models.vision.vit import Vit
from jaxtrain.sharding import activations

FREQUENCIES = np.exp(np.linspace(0, np.log(1000), 64)).astype(np.float32)  # of the sines of a time from 0 to 1
_PLACES = ("batch", None, "act_embed")


class ImageFlow(nnx.Module):
    """Noisy patches, times and labels to velocities."""

    def __init__(self, c: ImageFlowConfig, compute: Compute, *, rngs: nnx.Rngs):
        dim = c.embed_dim
        # pyrefly: ignore[bad-argument-type]
        self.image = Vit(c, compute, rngs=rngs)  # it has what Vit reads, under the same names
        self.labels = param(rngs, (c.num_labels, dim), (None, "embed"))
        self.up = Linear("bsf,fd->bsd", (2 * len(FREQUENCIES), dim), (None, "embed"), _PLACES, bias=True, rngs=rngs)
        self.down = Linear("bsd,de->bse", (dim, dim), ("embed", "ahead"), _PLACES, bias=True, rngs=rngs)
        self.velocity = Linear("btd,dp->btp", (dim, c.patch_values), ("embed", "ahead"), ("batch", "seq", None),
                               bias=True, std=0, rngs=rngs)  # 0 at first

    def __call__(self, noisy_BTP: jax.Array, images_BT: jax.Array, places_BT2: jax.Array, times_BS: jax.Array,
                 labels_BS: jax.Array) -> jax.Array:
        """Return the velocity of each value of each patch."""
        x_BTD = self.begin(noisy_BTP, images_BT, places_BT2, times_BS, labels_BS)
        return self.finish(self.image.encoder.through(x_BTD, activations.constrain(images_BT, "batch", "seq")))

    def begin(self, noisy_BTP: jax.Array, images_BT: jax.Array, places_BT2: jax.Array, times_BS: jax.Array,
              labels_BS: jax.Array) -> jax.Array:
        """Return the embeddings of patches."""
        given_BSD = self.given(*(activations.constrain(x, "batch", None) for x in (times_BS, labels_BS)))
        images_BT = activations.constrain(images_BT, "batch", "seq")
        own_BTS = (images_BT[..., None] == jnp.arange(1, times_BS.shape[1] + 1)).astype(given_BSD.dtype)
        x_BTD = self.image.begin(noisy_BTP, places_BT2, images_BT)
        return x_BTD + activations.constrain(jnp.einsum("bts,bsd->btd", own_BTS, given_BSD), *RESIDUAL)

    def finish(self, x_BTD: jax.Array) -> jax.Array:
        """Return the velocities from what the last layer returns."""
        return self.velocity(self.image.encoder.finish(x_BTD))

    def given(self, times_BS: jax.Array, labels_BS: jax.Array) -> jax.Array:
        """Return what an image's patches have in common."""
        table = activations.gather(self.labels[...], None, "embed")
        angle_BSF = times_BS[..., None] * FREQUENCIES
        waves_BSF = jnp.concatenate([jnp.sin(angle_BSF), jnp.cos(angle_BSF)], -1).astype(table.dtype)
        hits_BSL = (labels_BS[..., None] == jnp.arange(len(table))).astype(table.dtype)
        return self.down(jax.nn.silu(self.up(waves_BSF))) + jnp.einsum("bsl,ld->bsd", hits_BSL, table)
