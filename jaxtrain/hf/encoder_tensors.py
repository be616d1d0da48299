"""The tensors of published encoders of images and texts."""

from dataclasses import replace

from jaxtrain.config.vision_keys import CHANNELS, DualEncoderConfig, ImageConfig
from jaxtrain.hf.decoder_tensors import HEADS, OUT, gelu_mlp, pair
from jaxtrain.hf.hf_format import Entry


def _tower(ours: str, theirs: str, layers: int) -> list[Entry]:
    """Return the entries of the blocks of one of two encoders."""
    at = f"{theirs}.encoder.layers.{{layer}}"
    found = [entry for name in ("q", "k", "v") for entry in pair(
        f"attention/{name}", f"{at}.self_attn.{name}_proj", HEADS, "(hk)->hk", "kernel")]
    found += [*pair("attention/out", f"{at}.self_attn.out_proj", OUT, weight="kernel"),
              *pair("attention_norm", f"{at}.layer_norm1"), *pair("mlp_norm", f"{at}.layer_norm2"),
              *gelu_mlp("mlp", f"{at}.mlp")]
    return [replace(entry, ours=f"{ours}/blocks/layer/{entry.ours}", layers=range(layers)) for entry in found]


def image_encoder(c: ImageConfig) -> list[Entry]:
    """Return the entries of SigLIP's or CLIP's encoder of images."""
    at, patch = "vision_model.embeddings", (c.patch_size, c.patch_size, CHANNELS, c.image_embed_dim)
    first = [Entry("image/token", f"{at}.class_embedding"), *pair("image/first_norm", "vision_model.pre_layrnorm")]
    return [
        Entry("image/embed/kernel", f"{at}.patch_embedding.weight", "dcij->ijcd", cut=patch),
        Entry("image/grid/table", f"{at}.position_embedding.weight", "td->td"),
        *(first if c.class_token else [Entry("image/embed/bias", f"{at}.patch_embedding.bias")]),
        *_tower("image/encoder", "vision_model", c.image_layers),
        *pair("image/encoder/norm", "vision_model.post_layernorm")]


def dual_encoder(c: DualEncoderConfig) -> list[Entry]:
    """Return the entries of both encoders, without their heads."""
    text = "text_model"
    return [
        *image_encoder(c), Entry("embed/table", f"{text}.embeddings.token_embedding.weight", "vd->vd"),
        Entry("positions/table", f"{text}.embeddings.position_embedding.weight", "td->td"),
        *_tower("text", text, c.num_layers), *pair("text/norm", f"{text}.final_layer_norm")]
