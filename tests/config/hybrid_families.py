"""Draws config.json files of hybrids, and what jaxtrain takes them for; see `tests.config.families`."""

from collections.abc import Callable
from typing import Any

import numpy as np

FULL, LINEAR = "full_attention", "linear_attention"


def _kinds(*names: str) -> Callable[[dict[str, Any], np.random.Generator], Any]:
    """Return what draws a list with one of these kinds for each layer, or none."""
    def drawn(given: dict[str, Any], rng: np.random.Generator) -> Any:
        count = given.get("num_hidden_layers", 3) + int(rng.random() < 0.1)
        turns = [[*names], [names[0]], [names[0], *names], [names[-1]]][rng.integers(4)]
        return [None, (turns * count)[:count], [*rng.choice(names, count)]][rng.integers(3)]

    return drawn


def _some_layers(given: dict[str, Any], rng: np.random.Generator) -> Any:
    """Return the numbers of some layers, or none."""
    return [None, [], [1], [0, 2], [99], [1, 3]][rng.integers(6)]


def _mlps(given: dict[str, Any], rng: np.random.Generator) -> Any:
    """Return whether each layer has experts, mostly as models have them, or none."""
    if rng.random() < 0.2:
        return _kinds("sparse", "dense")(given, rng)
    count, dense = given.get("num_hidden_layers", 3), rng.integers(3)
    return [None, (["dense"] * dense + ["sparse"] * count)[:count]][rng.integers(2)]


def _delta_layers(given: dict[str, Any], rng: np.random.Generator) -> Any:
    """Return what Kimi Linear's first files say of layers with states."""
    count = given.get("num_hidden_layers", 3)
    full = [n + 1 for n in range(count) if (n + 1) % 2 == 0]
    found = {"full_attn_layers": full, "kda_layers": [n + 1 for n in range(count) if n + 1 not in full]}
    own = {"head_dim": 6, "num_heads": 2, "short_conv_kernel_size": 3}
    return [{}, found, own, found | own, {"full_attn_layers": [1]}][rng.integers(5)]


_NO_KV = {"num_key_value_heads": [1, 2]}  # of types that take no null
_DELTA = _NO_KV | {
    "head_dim": [8, 16], "linear_num_key_heads": [2], "linear_num_value_heads": [2, 4], "linear_key_head_dim": [6],
    "linear_value_head_dim": [4], "linear_conv_kernel_dim": [3, 2], "layer_types": _kinds(LINEAR, FULL),
    "full_attention_interval": [1, 2, 3], "attention_bias": [False, False, False, True],
    "partial_rotary_factor": [0.5, 1.0, 0.25, None]}
_EXPERTS = {"num_experts": [4], "num_experts_per_tok": [2, 3], "moe_intermediate_size": [6]}
_SHARED = {"shared_expert_intermediate_size": [8, 10]}
_STATES = {"mamba_n_heads": [4, 8], "mamba_n_groups": [1, 2], "mamba_d_state": [6], "mamba_d_conv": [3, 4],
           "mamba_expand": [2], "mamba_d_head": ["auto", "auto", "auto", 8], "mamba_conv_bias": [True, False],
           "mamba_proj_bias": [True, False], "mamba_chunk_size": [8], "time_step_limit": [
               [0.0, float("inf")], [0.01, 0.1], [0.2, 1.0], [0.0, 0.5], [0.1, float("inf")], None]}
_BIASES = {"attention_bias": [True, False], "mlp_bias": [True, False]}
# The keys that the types have beside those of shape and rotary positions, with values to draw from.
DRAWS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA, "qwen3_5_moe_text": _DELTA | _EXPERTS | _SHARED,
    "qwen3_next": _DELTA | _EXPERTS | _SHARED | {
        "norm_topk_prob": [True, False], "decoder_sparse_step": [1, 1, 2], "mlp_only_layers": [[], [0], [1], None]},
    "olmo_hybrid": {
        "head_dim": [6], "linear_num_key_heads": [2, None], "linear_num_value_heads": [2, 4, None],
        "linear_key_head_dim": [6, None], "linear_value_head_dim": [4, None], "linear_conv_kernel_dim": [3],
        "linear_allow_neg_eigval": [True, False], "layer_types": _kinds(LINEAR, FULL),
        "attention_bias": [False, False, False, True],
        "rope_parameters": [None, {"rope_theta": None}, {"rope_theta": None, "rope_type": "default"},
                            {"rope_theta": 70.0}, {"rope_type": "linear", "factor": 2.0}],
        "rope_theta": [50.0, 70.0, None]},
    "kimi_linear": {
        "tie_word_embeddings": [False, False, False, True],
        "num_key_value_heads": [None, None, 2], "num_local_experts": [8], "num_experts_per_tok": [2, 3],
        "moe_intermediate_size": [6], "n_shared_experts": [1, 2], "routed_scaling_factor": [2.5], "n_group": [4, 1],
        "topk_group": [2, 1], "norm_topk_prob": [True, False], "moe_renormalize": [True, False],
        "q_lora_rank": [12, None], "kv_lora_rank": [12], "qk_nope_head_dim": [6], "qk_rope_head_dim": [4],
        "v_head_dim": [8], "linear_head_dim": [8], "linear_num_heads": [4], "linear_conv_kernel_dim": [4, 3],
        "linear_attn_config": _delta_layers, "layer_types": _kinds(LINEAR, FULL),
        "mlp_layer_types": _kinds("sparse", "dense"), "first_k_dense_replace": [0, 1, 2],
        "attention_bias": [False, False, False, True], "head_dim": [6]},
    "bailing_hybrid": {
        "tie_word_embeddings": [False, False, False, True], "num_key_value_heads": [None, None, None, 2],
        "num_experts": [8], "num_experts_per_tok": [2], "num_experts_per_token": [3],
        "moe_intermediate_size": [6], "num_shared_experts": [1, 2], "routed_scaling_factor": [2.5], "n_group": [4, 1],
        "topk_group": [2, 1], "norm_topk_prob": [True, False], "q_lora_rank": [12, None], "kv_lora_rank": [12],
        "qk_nope_head_dim": [6], "qk_rope_head_dim": [4], "v_head_dim": [8], "head_dim": [8, 6],
        "linear_head_dim": [10], "linear_num_heads": [8], "linear_conv_kernel_dim": [2],
        "short_conv_kernel_size": [4, 3], "layer_group_size": [1, 2, 3], "layer_types": _kinds(LINEAR, FULL),
        "mlp_layer_types": _mlps, "first_k_dense_replace": [0, 1, 2],
        "kda_safe_gate": [True, True, False], "kda_lower_bound": [-5.0, -3.0], "rope_theta": [50.0, 70],
        "partial_rotary_factor": [0.5], "num_nextn_predict_layers": [0, 1],
        "attention_bias": [False, False, False, True]},
    "mamba2": {
        "num_heads": [4, 8], "head_dim": [8, 16], "state_size": [6], "expand": [2], "n_groups": [1, 2],
        "conv_kernel": [3, 4], "use_bias": [True, False], "use_conv_bias": [True, False],
        "layer_norm_epsilon": [1e-4], "time_step_limit": [[0.0, float("inf")], [0.01, 0.1], [0.2, 1.0]],
        "residual_in_fp32": [True, False], "hidden_act": ["silu", "swish", "silu", "gelu"], "chunk_size": [8],
        "rms_norm": [True]},
    "nemotron_h": {
        "tie_word_embeddings": [False, False, False, True],
        "layers_block_type": _kinds(LINEAR, "moe", FULL, "mlp"),
        "hybrid_override_pattern": ["M-M*", "ME*E", "M*", "MXM"],
        "num_key_value_heads": [1, 2, None], "head_dim": [6], "attention_bias": [True, False],
        "mlp_bias": [True, False], "sliding_window": [3, None], "mamba_num_heads": [4], "mamba_head_dim": [8],
        "n_groups": [1, 2], "mamba_n_groups": [4], "ssm_state_size": [6], "conv_kernel": [3, 4], "mamba_d_conv": [2],
        "use_conv_bias": [True, False], "mamba_conv_bias": [True, False], "use_bias": [True, False],
        "mamba_proj_bias": [True, False], "time_step_min": [0.01], "mamba_dt_min": [0.02],
        "time_step_limit": [[0.01, 0.1]], "layer_norm_epsilon": [1e-4], "n_routed_experts": [8],
        "n_shared_experts": [1, 2], "num_experts_per_tok": [2, 3], "moe_intermediate_size": [6],
        "moe_shared_expert_intermediate_size": [10], "moe_latent_size": [12, None], "norm_topk_prob": [True, False],
        "routed_scaling_factor": [2.5, 2], "n_group": [4, 1], "topk_group": [2, 1], "residual_in_fp32": [True, False],
        "mlp_hidden_act": ["relu2", "relu2", "relu2", "silu"], "expand": [2, 3]},
    "granitemoehybrid": _STATES | {
        "embedding_multiplier": [6.0, 12], "attention_multiplier": [0.3], "logits_scaling": [4.0, 8, None],
        "residual_multiplier": [0.22], "attention_bias": [True, False], "num_local_experts": [4, 0, None],
        "num_experts_per_tok": [2, 0, None], "shared_intermediate_size": [8, 10], "head_dim": [6],
        "position_embedding_type": ["rope", "nope", None], "layer_types": _kinds("mamba", "attention")},
    "bamba": _STATES | _BIASES | {"num_key_value_heads": [1, 2], "attn_layer_indices": _some_layers, "head_dim": [8]},
    "falcon_h1": _STATES | _BIASES | {
        "num_key_value_heads": [1, 2], "mamba_d_ssm": [32, 64, None, None], "mamba_rms_norm": [True, False],
        "mamba_norm_before_gate": [True, False], "projectors_bias": [True, False],
        "lm_head_multiplier": [0.5, 0.7, 0.9, None], "embedding_multiplier": [2.0], "key_multiplier": [0.3],
        "mlp_multipliers": [[0.5, 0.7], [2.0, 0.3], None, [1.0]],
        "attention_out_multiplier": [0.6], "attention_in_multiplier": [0.8, 0.7, None], "ssm_in_multiplier": [1.5],
        "ssm_multipliers": [[0.5, 0.6, 0.7, 0.8, 0.9], None], "ssm_out_multiplier": [0.4], "head_dim": [6]},
    "lfm2": {
        "num_key_value_heads": [1, 2], "norm_eps": [1e-4], "conv_bias": [True, False], "conv_L_cache": [3, 2],
        "block_multiple_of": [4, 8], "block_ffn_dim_multiplier": [1.0, 1.3, 2],
        "block_auto_adjust_ff_dim": [True, False], "block_ff_dim": [24], "full_attn_idxs": _some_layers,
        "layer_types": _kinds("conv", FULL), "tie_embedding": [True, False], "head_dim": [6], "block_dim": [16]},
    "lfm2_moe": {
        "num_key_value_heads": [1, 2], "norm_eps": [1e-4], "conv_bias": [True, False], "conv_L_cache": [3, 2],
        "layer_types": _kinds("conv", FULL), "tie_embedding": [True, False], "head_dim": [6],
        "moe_intermediate_size": [6], "num_dense_layers": [0, 1, 2], "num_experts": [4], "num_experts_per_tok": [2, 3],
        "use_expert_bias": [True, False], "norm_topk_prob": [True, False], "routed_scaling_factor": [2.5]},
}
KINDS = tuple(DRAWS)
# What decides how large a model is.
SIZES = {"mamba_n_heads", "mamba_d_state", "mamba_expand", "mamba_d_head", "num_heads", "head_dim", "state_size",
         "expand", "n_groups", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "layers_block_type",
         "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
         "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
         "linear_head_dim", "linear_num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mamba_d_ssm",
         "num_key_value_heads", "mamba_n_groups"}
_NAMES = {"D": "states", "M": "states", "A": "attention", "C": "convolution", "F": "mlp", "E": "experts"}
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


def shape(c: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the shape of a model, as `hybrid_families_truth.shape` does."""
    letters = {"mamba2": "M", "falcon_h1": "B"}.get(c.name, "")
    kinds = letters * c.num_layers if letters else c.layer_kinds
    e, layers = c.experts, range(c.num_layers)
    sparse = [e.num > 0 and n >= e.dense_layers and (n - e.dense_layers + 1) % e.every == 0 for n in layers]
    sparse = [kind == "E" for kind in kinds] if c.name == "nemotron_h" else sparse
    found = {"vocab_size": c.vocab_size, "layers": c.num_layers, "width": c.embed_dim, "tied": c.tied_embeddings,
             "eps": c.norm_eps, "kinds": [_NAMES.get(kind, "both") for kind in kinds], "sparse": sparse,
             "length": None if c.name == "mamba2" else c.max_seq_len}
    if {*"MBD"} & {*kinds}:
        found["states"] = _states(c)
    if {*"AB"} & {*kinds}:
        found["attention"] = _attention(c)
    if "C" in kinds:
        found["convolution"] = [c.conv_width, c.conv_bias]
    if any(sparse):
        biased = e.bias_rate > 0
        found["experts"] = [e.num, e.per_token, e.mlp_dim, e.shared_width, e.latent_dim, e.shared_gated,
                            [e.groups, e.groups_used] if e.groups > 1 else None, e.score, e.normalized, e.scale, biased]
    if c.name != "mamba2" and ("F" in kinds or (c.name != "nemotron_h" and not all(sparse))):
        found["mlp"] = [c.shared_mlp_dim if c.name == "granitemoehybrid" else c.mlp_dim, getattr(c, "mlp_bias", False)]
    return found | {"own": _own(c)}


def _states(c: Any) -> dict[str, Any]:
    if hasattr(c, "state_key_dim"):
        return {"heads": c.state_heads, "key_heads": c.state_key_heads, "key": c.state_key_dim,
                "value": c.state_value_dim, "conv": c.conv_width,
                "beta": 2.0 if getattr(c, "negative_eigenvalues", False) else 1.0,
                "bound": getattr(c, "decay_bound", 0.0)}
    return {"heads": c.state_heads, "head_dim": c.state_head_dim, "groups": c.state_groups, "dim": c.state_dim,
            "conv": c.conv_width, "steps": [c.least_step, c.largest_step],
            "biases": [c.conv_bias, c.state_bias, getattr(c, "state_out_bias", c.state_bias)],
            "norm": getattr(c, "state_norm", "after_gate")}


def _attention(c: Any) -> dict[str, Any]:
    from jaxtrain.models.attention.rotary import scaled_frequencies, score_factor

    width = c.head_dim + getattr(c, "rope_head_dim", 0)
    found: dict[str, Any] = {"heads": c.num_heads, "head_dim": width, "bias": getattr(c, "attention_bias", False),
                             "scores": getattr(c, "attention_multiplier", width ** -0.5), "window": c.window}
    if c.latent_attention:
        found |= {"turning": c.rope_head_dim, "value": c.value_head_dim, "latents": [c.q_rank, c.kv_rank]}
        turns, scale = scaled_frequencies(c, c.rotary_width) if c.rotary_width else ((), 1.0)
        return found | {"scores": found["scores"] * score_factor(c),
                        "turns": [*map(float, turns), float(scale)] if c.rotary_width else None}
    turning = getattr(c, "rotary_width", 0) and c.name != "nemotron_h"
    turns, scale = scaled_frequencies(c, c.rotary_width) if turning else ((), 1.0)
    return found | {"kv": c.num_kv_heads, "turns": [*map(float, turns), float(scale)] if turning else None}


def _own(c: Any) -> dict[str, Any]:
    if c.name == "granitemoehybrid":
        return {key: getattr(c, key) for key in _MULTIPLIERS}
    return {key: getattr(c, key) for key in sorted(vars(c)) if key.endswith("_multiplier")}
