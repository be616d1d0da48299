"""OLMoE: norms of all heads together, and small experts in every layer (arXiv 2409.02060)."""

from dataclasses import dataclass

from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors
from jaxtrain.hf.hf_format import COMMON, NO, SILU, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import published_rotary, rotary
from jaxtrain.models.minimax_m2 import all_heads_normalised
from jaxtrain.models.mixtral import ExpertsConfig


@dataclass(frozen=True)
class OlmoeConfig(ExpertsConfig):
    """OLMoE."""

    name: str = "olmoe"


def _read(known: Keys, refuse: Refuse) -> Keys:
    if known.get("head_dim") not in (None, known["hidden_size"] // known["num_attention_heads"]):
        raise refuse("head_dim", "cannot be expressed: the norms of transformers have the width of the model")
    return rotary("olmoe", known, refuse)


def _write(c: OlmoeConfig) -> Keys:
    return published_rotary(c) | {"pad_token_id": None}


def _layer(c: OlmoeConfig, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.ALL_HEADS_QK_NORMS, *decoder_tensors.NORMS,
            *decoder_tensors.experts(c)]


FAMILY = Family(
    OlmoeConfig, all_heads_normalised, tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("olmoe", "OlmoeForCausalLM", COMMON | {
        "num_experts": "num_experts", "num_experts_per_tok": "experts_per_token", "norm_topk_prob": "normalize_router",
        "intermediate_size": "expert_mlp_dim"},
        fixed={"attention_bias": NO, "hidden_act": SILU, "clip_qkv": (None,)}, read=_read, write=_write,
        classifier=None),))
