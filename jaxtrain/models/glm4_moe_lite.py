"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts, with a list of the layers that have some."""

from dataclasses import dataclass

from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors, layer_patterns, multi_token_tensors
from jaxtrain.hf.hf_format import BIASES, COMMON, HFConfig, Keys, Refuse
from jaxtrain.models.deepseek_v3 import (
    BIAS_RATE,
    EXPERT_KEYS,
    LATENT_KEYS,
    MTP_KEYS,
    DeepseekV3Config,
    deepseek_v3,
    latent_layer,
    latents,
    written_latents,
)


@dataclass(frozen=True)
class Glm4MoeLiteConfig(DeepseekV3Config):
    """GLM-4.7-Flash."""

    name: str = "glm4_moe_lite"


def _read(known: Keys, refuse: Refuse) -> Keys:
    return {"router": "sigmoid", "router_bias_rate": BIAS_RATE} | layer_patterns.listed_mlps(known, refuse) | latents(
        "glm4_moe_lite", known, refuse) | multi_token_tensors.layers(known, refuse, MTP_KEYS[0])


def _write(c: Glm4MoeLiteConfig) -> Keys:
    return written_latents(c) | {"mlp_layer_types": layer_patterns.published_mlps(c)} | (
        multi_token_tensors.written_layers(c, MTP_KEYS[0]))


FAMILY = Family(
    Glm4MoeLiteConfig, deepseek_v3,
    tensors=decoder_tensors.decoder(latent_layer, ahead=multi_token_tensors.further_layers),
    hf=(HFConfig("glm4_moe_lite", "Glm4MoeLiteForCausalLM", COMMON | LATENT_KEYS | {
        key: ours for key, ours in EXPERT_KEYS.items() if key != "first_k_dense_replace"},
        fixed=BIASES | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "rope_interleave": (True,)},
        read=_read, write=_write, classifier=None),))
