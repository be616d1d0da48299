"""Hunyuan-A13B: queries and keys are normalised after they have turned; a shared expert beside the routed ones.

https://github.com/Tencent-Hunyuan/Hunyuan-A13B
"""

from dataclasses import dataclass

from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.alpha_rotary import alpha_rotary, published_alpha_rotary
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.models.hunyuan_v1_dense import HunyuanConfig, attention_tensors, hunyuan
from jaxtrain.models.mixtral import ExpertsConfig


@dataclass(frozen=True)
class HunyuanV1MoeConfig(HunyuanConfig, ExpertsConfig):
    """Hunyuan's mixtures of experts."""

    name: str = "hunyuan_v1_moe"


def _read(known: Keys, refuse: Refuse) -> Keys:
    chosen = known["moe_topk"] if isinstance(known["moe_topk"], list) else [known["moe_topk"]]
    if len({*chosen}) != 1:
        raise refuse("moe_topk", "cannot be expressed: all layers choose as many experts")
    return {"experts_per_token": chosen[0], "shared_experts": 1} | alpha_rotary("hunyuan_v1_moe", known, refuse)


def _write(c: HunyuanV1MoeConfig) -> Keys:
    return published_alpha_rotary(c) | {"moe_topk": c.experts_per_token, "pad_token_id": None}


def _layer(c: HunyuanV1MoeConfig, experts: bool) -> list[Entry]:
    return [*attention_tensors(c), *decoder_tensors.experts(c, router="gate.wg.weight", shared="shared_mlp")]


FAMILY = Family(
    HunyuanV1MoeConfig, hunyuan, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", COMMON | {
        "num_experts": "num_experts", "intermediate_size": "expert_mlp_dim", "attention_bias": "attention_bias"},
        fixed={"hidden_act": SILU}, read=_read, write=_write),))
