"""CLIP (arXiv 2103.00020): an encoder of images and a causal one of texts, whose embeddings are compared."""

from functools import partial

from jaxtrain.config.family import Family
from jaxtrain.config.vision_keys import DualEncoderConfig
from jaxtrain.hf import dual_encoders
from jaxtrain.hf.encoder_tensors import dual_encoder
from jaxtrain.hf.hf_format import Entry, HFConfig, HFTensors
from jaxtrain.models.siglip import siglip, useful_flops


def _entries(c: DualEncoderConfig, reward_head: bool) -> list[Entry]:
    return [Entry("scale", "logit_scale", "->", cut=()), Entry("text_head/kernel", "text_projection.weight", "ed->de"),
            Entry("image_head/kernel", "visual_projection.weight", "ed->de"), *dual_encoder(c)]


FAMILY = Family(
    DualEncoderConfig, siglip, objective="jaxtrain.objectives.contrastive:Contrastive", useful_flops=useful_flops,
    tensors=HFTensors(_entries, prefix=""),
    hf=(HFConfig("clip", "CLIPModel", own_read=partial(dual_encoders.section, "clip"),
                 own_write=dual_encoders.described, beside=partial(dual_encoders.beside, "clip"),
                 unpublished=dual_encoders.UNPUBLISHED),))
