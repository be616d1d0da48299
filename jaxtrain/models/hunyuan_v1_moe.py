"""Hunyuan-A13B: queries and keys are normalised after they have turned; a shared expert beside the routed ones.

https://github.com/Tencent-Hunyuan/Hunyuan-A13B
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.alpha_rotary import alpha_rotary, published_alpha_rotary
from jaxtrain.hf.hf_format import COMMON, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.models.mixtral import ExpertsConfig

if TYPE_CHECKING:
    from flax import nnx

    from jaxtrain.models.decoder import Compute, Decoder


@dataclass(frozen=True)
class HunyuanV1MoeConfig(ExpertsConfig):
    """Hunyuan's mixtures of experts."""

    name: str = "hunyuan_v1_moe"
    attention_bias: bool = False  # whether queries, keys, values and what attention returns have biases


def hunyuan_v1_moe(c: HunyuanV1MoeConfig, compute: "Compute", *, rngs: "nnx.Rngs") -> "Decoder":
    """Build a decoder of one of Hunyuan's mixtures."""
    from jaxtrain.models.attention.norm_last import NormLastAttention
    from jaxtrain.models.layers import RMSNorm
    from jaxtrain.models.rotary_decoder import grouped_query, rotary_decoder

    attention = grouped_query(c, compute, NormLastAttention, qkv_bias=c.attention_bias, out_bias=c.attention_bias,
                              qk_norm=partial(RMSNorm, c.head_dim, c.norm_eps, axis="head_dim"))
    return rotary_decoder(c, compute, attention, rngs=rngs)


def _read(known: Keys, refuse: Refuse) -> Keys:
    chosen = known["moe_topk"] if isinstance(known["moe_topk"], list) else [known["moe_topk"]]
    if len({*chosen}) != 1:
        raise refuse("moe_topk", "cannot be expressed: all layers choose as many experts")
    return {"experts_per_token": chosen[0], "shared_experts": 1} | alpha_rotary("hunyuan_v1_moe", known, refuse)


def _write(c: HunyuanV1MoeConfig) -> Keys:
    return published_alpha_rotary(c) | {"moe_topk": c.experts_per_token, "pad_token_id": None}


def _layer(c: HunyuanV1MoeConfig, experts: bool) -> list[Entry]:
    norms = [Entry(f"attention/{ours}_norm/scale", f"self_attn.{theirs}_layernorm.weight")
             for ours, theirs in (("q", "query"), ("k", "key"))]
    return [*decoder_tensors.ATTENTION, *decoder_tensors.biases(c.attention_bias, c.attention_bias), *norms,
            *decoder_tensors.NORMS, *decoder_tensors.experts(c, router="gate.wg.weight", shared="shared_mlp")]


FAMILY = Family(
    HunyuanV1MoeConfig, hunyuan_v1_moe, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", COMMON | {
        "num_experts": "num_experts", "intermediate_size": "expert_mlp_dim", "attention_bias": "attention_bias"},
        fixed={"hidden_act": SILU}, read=_read, write=_write),))
