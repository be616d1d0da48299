"""Hunyuan 3: normalised queries and keys, and DeepSeek-V3's experts in all layers but some.

https://huggingface.co/tencent/Hy3-preview
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors, layer_patterns
from jaxtrain.hf.hf_format import COMMON, NO, SILU, Entry, HFConfig, Keys, Refuse, renaming
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.deepseek_v3 import BIAS_RATE
from jaxtrain.models.llama import dense
from jaxtrain.models.mixtral import ExpertsConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class HyV3Config(ExpertsConfig):
    """Hunyuan 3."""

    name: str = "hy_v3"
    attention_bias: bool = False  # whether queries, keys, values and what attention returns have biases


def hy_v3(c: HyV3Config, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a Hunyuan 3 decoder."""
    return dense(c, compute, qk_norm=True, qkv_bias=c.attention_bias, out_bias=c.attention_bias, rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    return {"router": "sigmoid", "router_bias_rate": BIAS_RATE} | layer_patterns.listed_mlps(known, refuse) | rotary(
        "hy_v3", known, refuse)


def _write(c: HyV3Config) -> Keys:
    return published_rotary(c) | {"mlp_layer_types": layer_patterns.published_mlps(c)}


def _layer(c: HyV3Config, experts: bool) -> list[Entry]:
    routed = decoder_tensors.experts(c, router="router.gate.weight", bias="expert_bias", shared="shared_mlp")
    return [*decoder_tensors.ATTENTION, *decoder_tensors.biases(c.attention_bias, c.attention_bias),
            *decoder_tensors.QK_NORMS, *decoder_tensors.NORMS, *(routed if experts else decoder_tensors.swiglu())]


FAMILY = Family(
    HyV3Config, hy_v3, tensors=decoder_tensors.decoder(_layer, further_layers=True, own_name=renaming({
        r"\.mlp\.gate\.weight$": ".mlp.router.gate.weight", r"\.mlp\.shared_experts\.": ".mlp.shared_mlp.",
        r"\.mlp\.e_score_correction_bias$": ".mlp.expert_bias"})),
    hf=(HFConfig("hy_v3", "HYV3ForCausalLM", COMMON | {
        "num_experts": "num_experts", "num_experts_per_tok": "experts_per_token", "attention_bias": "attention_bias",
        "num_shared_experts": "shared_experts", "moe_intermediate_size": "expert_mlp_dim",
        "router_scaling_factor": "router_scale"}, fixed={"mlp_bias": NO, "hidden_act": SILU}, read=_read, write=_write,
        classifier=None),))
