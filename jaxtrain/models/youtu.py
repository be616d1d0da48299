"""Youtu-LLM: DeepSeek-V3's latent attention, and a dense MLP in every layer (arXiv 2512.24618)."""

from dataclasses import dataclass

from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, NO, SILU, HFConfig, Keys, Refuse
from jaxtrain.models.deepseek_v3 import (
    LATENT_KEYS,
    LatentConfig,
    latent_decoder,
    latent_layer,
    latents,
    written_latents,
)


@dataclass(frozen=True)
class YoutuConfig(LatentConfig):
    """Youtu-LLM."""

    name: str = "youtu"


def _read(known: Keys, refuse: Refuse) -> Keys:
    return latents("youtu", known, refuse)


FAMILY = Family(
    YoutuConfig, latent_decoder, tensors=decoder_tensors.decoder(latent_layer),
    hf=(HFConfig("youtu", "YoutuForCausalLM", COMMON | LATENT_KEYS, fixed={
        "attention_bias": NO, "hidden_act": SILU, "rope_interleave": (True,)},
        read=_read, write=written_latents, classifier=None),))
