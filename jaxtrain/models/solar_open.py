"""Solar Open: GLM-4.5's layers, of which all have experts; rotary positions of whole heads.

https://huggingface.co/upstage/Solar-Open-100B
"""

from dataclasses import dataclass

from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, NO, SILU, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import partial_rotary, published_partial_rotary
from jaxtrain.models.deepseek_v3 import BIAS_RATE, EXPERT_KEYS
from jaxtrain.models.glm4_moe import Glm4MoeConfig, glm4_moe, layer


@dataclass(frozen=True)
class SolarOpenConfig(Glm4MoeConfig):
    """Solar Open."""

    name: str = "solar_open"
    rotary_part: float = 1.0


def _read(known: Keys, refuse: Refuse) -> Keys:
    return {"router": "sigmoid", "router_bias_rate": BIAS_RATE} | partial_rotary("solar_open", 1.0, known, refuse)


FAMILY = Family(
    SolarOpenConfig, glm4_moe, tensors=decoder_tensors.decoder(layer),
    hf=(HFConfig("solar_open", "SolarOpenForCausalLM", {
        key: ours for key, ours in (COMMON | EXPERT_KEYS).items()
        if key not in ("first_k_dense_replace", "intermediate_size")} | {"attention_bias": "attention_bias"},
        fixed={"hidden_act": SILU, "use_qk_norm": NO}, read=_read, write=published_partial_rotary, classifier=None),))
