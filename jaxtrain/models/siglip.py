"""SigLIP (arXiv 2303.15343): an encoder of images and one of texts, whose embeddings are compared."""

from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.config.vision_keys import DualEncoderConfig
from jaxtrain.hf import dual_encoders
from jaxtrain.hf.decoder_tensors import OUT, gelu_mlp, pair
from jaxtrain.hf.encoder_tensors import dual_encoder
from jaxtrain.hf.hf_format import Entry, HFConfig, HFTensors
from jaxtrain.models.row_flops import INPUT, Need, attended

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute
    from jaxtrain.models.vision.dual_encoder import DualEncoder


def siglip(c: DualEncoderConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "DualEncoder":
    """Build both encoders, of SigLIP or CLIP."""
    from jaxtrain.models.vision.dual_encoder import DualEncoder

    return DualEncoder(c, compute, rngs=rngs)


def useful_flops(c: DualEncoderConfig, patches: int) -> Need:
    """Images meet their encoder, and as vectors the rest; a batch's similarities, less than 0.1 %, do not count."""
    images = c.images_per_row
    tokens = images * c.text_len
    seen = c.text_len / 2 if c.name == "clip" else c.text_len  # by a token, on average

    def met(path: str) -> float:
        room = path.split("/")[0]
        if path == "image/embed/kernel":
            return INPUT * patches
        if path == "pool/q/kernel":
            return 0  # of one vector a batch
        return patches if room == "image" or path.startswith(("pool/k/", "pool/v/")) else (
            tokens if room == "text" else images)

    pooled = attended(1, c.image_embed_dim, patches) if c.pooling in ("attention", "probe") else 0
    return met, (attended(c.image_layers, c.image_embed_dim, patches**2 / images) + pooled
                 + attended(c.num_layers, c.embed_dim, tokens * seen))


def _entries(c: DualEncoderConfig, reward_head: bool) -> list[Entry]:
    head, wide = "vision_model.head", c.image_embed_dim
    return [
        Entry("pool/query", f"{head}.probe", "abd->abd", cut=(1, 1, wide)),
        *(entry for n, name in enumerate("qkv") for entry in (
            Entry(f"pool/{name}/kernel", f"{head}.attention.in_proj_weight", "(phk)d->dhk", (n, 3)),
            Entry(f"pool/{name}/bias", f"{head}.attention.in_proj_bias", "(phk)->hk", (n, 3)))),
        *pair("pool/out", f"{head}.attention.out_proj", OUT, weight="kernel"),
        *pair("pool/norm", f"{head}.layernorm"), *gelu_mlp("pool/mlp", f"{head}.mlp"),
        *pair("text_head", "text_model.head", "ed->de", weight="kernel"), Entry("scale", "logit_scale"),
        Entry("bias", "logit_bias"), *dual_encoder(c)]


FAMILY = Family(
    DualEncoderConfig, siglip, objective="jaxtrain.objectives.contrastive:Contrastive", useful_flops=useful_flops,
    tensors=HFTensors(_entries, prefix=""),
    hf=(HFConfig("siglip", "SiglipModel", own_read=partial(dual_encoders.section, "siglip"),
                 own_write=dual_encoders.described, beside=partial(dual_encoders.beside, "siglip"),
                 unpublished=dual_encoders.UNPUBLISHED),))
