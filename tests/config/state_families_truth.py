"""The shapes that transformers takes from files of types with Mamba-2 or short convolutions; see `families_truth`."""

import math
import sys
from typing import Any

import transformers

_CLASSES = {"granitemoehybrid": "GraniteMoeHybrid", "bamba": "Bamba", "falcon_h1": "FalconH1", "lfm2": "Lfm2",
            "lfm2_moe": "Lfm2Moe"}
_FACTORS = ("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier",
            "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier")


def shape(c: Any) -> dict[str, Any]:
    """Return the shape of a model, as `state_families.shape` does."""
    kind = c.model_type
    layers = ["linear_attention"] * c.num_hidden_layers if kind == "falcon_h1" else [*c.layer_types]
    assert len(layers) == c.num_hidden_layers
    eps = next(getattr(c, name) for name in ("layer_norm_epsilon", "norm_eps", "rms_norm_eps") if hasattr(c, name))
    found: dict[str, Any] = {"vocab_size": c.vocab_size, "width": c.hidden_size, "eps": eps, "kinds": layers,
                             "tied": bool(c.tie_word_embeddings)}
    if "full_attention" in layers or kind == "falcon_h1":
        heads, kv = c.num_attention_heads, c.num_key_value_heads
        assert heads % kv == 0
        found |= {"heads": [heads, kv, getattr(c, "head_dim", None) or c.hidden_size // heads],
                  "length": c.max_position_embeddings}
        if kind in _CLASSES and getattr(c, "position_embedding_type", "rope") == "rope":
            there = sys.modules[getattr(transformers, f"{_CLASSES[kind]}Model").__module__]
            rotary = getattr(there, f"{_CLASSES[kind]}RotaryEmbedding")(c)
            found["turns"] = [*map(float, rotary.inv_freq), float(rotary.attention_scaling)]
    if "linear_attention" in layers:
        found["states"] = _states(c, kind)
    if "conv" in layers:
        found["convolutions"] = [c.conv_L_cache, c.conv_bias]
    if experts := _experts(c, kind, layers):
        found["experts"] = experts
    return found | {"own": _own(c, kind, layers)}


def _states(c: Any, kind: str) -> list[Any]:
    if kind == "nemotron_h":
        sizes, limits = [c.mamba_num_heads, c.mamba_head_dim, c.n_groups, c.ssm_state_size, c.conv_kernel,
                         c.use_conv_bias, c.use_bias], (c.time_step_min, math.inf)
    else:
        limits = c.time_step_limit
        sizes = ([c.num_heads, c.head_dim, c.n_groups, c.state_size, c.conv_kernel, c.use_conv_bias, c.use_bias]
                 if kind == "mamba2" else [c.mamba_n_heads, c.mamba_d_head, c.mamba_n_groups, c.mamba_d_state,
                                           c.mamba_d_conv, c.mamba_conv_bias, c.mamba_proj_bias])
    assert sizes[0] % sizes[2] == 0
    return [*sizes, max(limits[0], 0.0), 0.0 if math.isinf(limits[1]) else limits[1]]


def _experts(c: Any, kind: str, layers: list[str]) -> list[Any]:
    if kind == "nemotron_h" and "moe" in layers:
        assert c.n_routed_experts % c.n_group == 0 and c.topk_group <= c.n_group
        assert c.num_experts_per_tok <= c.n_routed_experts // c.n_group * c.topk_group
        return [c.n_routed_experts, c.num_experts_per_tok, c.moe_intermediate_size,
                c.moe_shared_expert_intermediate_size, c.moe_latent_size or 0, c.n_group, c.topk_group,
                c.routed_scaling_factor, c.norm_topk_prob, 0, True]
    if kind == "granitemoehybrid" and c.num_local_experts:
        assert c.num_experts_per_tok <= c.num_local_experts
        return [c.num_local_experts, c.num_experts_per_tok, c.intermediate_size, c.shared_intermediate_size, 0, 1, 1,
                1.0, True, 0, False]
    if kind == "lfm2_moe":
        assert c.num_experts_per_tok <= c.num_experts
        return [c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size, 0, 0, 1, 1, c.routed_scaling_factor,
                c.norm_topk_prob, c.num_dense_layers, c.use_expert_bias]
    return []


def _own(c: Any, kind: str, layers: list[str]) -> dict[str, Any]:
    if kind == "nemotron_h":
        return {"mlp": c.intermediate_size if "mlp" in layers else None, "mlp_bias": c.mlp_bias}
    if kind == "granitemoehybrid":
        return {"mlp": c.shared_intermediate_size, "attention_bias": c.attention_bias, "factors": [
            c.embedding_multiplier, c.attention_multiplier, c.residual_multiplier, c.logits_scaling]}
    own: dict[str, Any] = {} if kind == "mamba2" else {"mlp": c.intermediate_size}
    if kind == "lfm2":
        there = sys.modules[transformers.Lfm2Model.__module__]
        own["mlp"] = there.Lfm2MLP(c).w1.out_features
    if kind in ("bamba", "falcon_h1"):
        own["biases"] = [c.attention_bias, c.mlp_bias]
    if kind == "falcon_h1":
        norm = ("before_gate" if c.mamba_norm_before_gate else "after_gate") if c.mamba_rms_norm else "none"
        own |= {"out_bias": c.projectors_bias, "norm": norm, "factors": [getattr(c, name) for name in _FACTORS],
                "lists": [c.mlp_multipliers, c.ssm_multipliers]}
    return own
