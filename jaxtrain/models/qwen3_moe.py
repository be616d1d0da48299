"""Qwen3-MoE: Qwen3's attention, and routed experts in some or all layers (arXiv 2505.09388)."""

from functools import partial

from jaxtrain.config.family import Family
from jaxtrain.hf import decoder_tensors, layer_patterns
from jaxtrain.hf.hf_format import COMMON, Entry, HFConfig, Keys, Refuse
from jaxtrain.hf.rotary_keys import rotary
from jaxtrain.models.llama import dense, written
from jaxtrain.models.mixtral import ExpertsConfig


def _read(known: Keys, refuse: Refuse) -> Keys:
    used = known["sliding_window"] if known["use_sliding_window"] else None
    first, every = layer_patterns.routed(known, refuse)
    return {"window": layer_patterns.window_everywhere(known, refuse, used), "dense_layers": first,
            "experts_every": every} | rotary("qwen3_moe", known, refuse)


def _write(c: ExpertsConfig) -> Keys:
    window = {"use_sliding_window": True, "max_window_layers": 0} if c.window else {}
    return written(c) | window | {"mlp_only_layers": list(range(c.dense_layers)),
                                  "decoder_sparse_step": c.experts_every}


def _layer(c: ExpertsConfig, experts: bool) -> list[Entry]:
    return [*decoder_tensors.ATTENTION, *decoder_tensors.QK_NORMS, *decoder_tensors.NORMS,
            *(decoder_tensors.experts(c) if experts else decoder_tensors.swiglu())]


FAMILY = Family(
    ExpertsConfig, partial(dense, qk_norm=True), tensors=decoder_tensors.decoder(_layer),
    hf=(HFConfig("qwen3_moe", "Qwen3MoeForCausalLM", COMMON | {
        "num_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
        "moe_intermediate_size": "expert_mlp_dim", "norm_topk_prob": "normalize_router"}, read=_read, write=_write),))
