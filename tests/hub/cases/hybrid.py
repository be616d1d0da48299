"""Decoders with states in place of attention in some or all layers."""

from typing import Any

from tests.hub.cases.sizes import LATENT, SIZES

# A larger epsilon: norms of small states enlarge the rounding of float32, here and in transformers.
_DELTA = SIZES | {
    "rms_norm_eps": 1e-2,
    "num_hidden_layers": 4, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3}
_LATENT = {key: value for key, value in LATENT.items() if key not in ("n_routed_experts", "first_k_dense_replace")} | {
    "num_local_experts": 8, "q_lora_rank": None}
_GATED_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
                  "shared_expert_intermediate_size": 10}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name: (model type, what transformers is given)
    "qwen3_5": ("qwen3_5_text", _DELTA | {
        "layer_types": ["linear_attention", "full_attention"] * 2, "partial_rotary_factor": 0.5}),
    "qwen3_5_moe": ("qwen3_5_moe_text", _DELTA | _GATED_EXPERTS | {
        "rms_norm_eps": 1e-1, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}),
    "qwen3_next": ("qwen3_next", _DELTA | _GATED_EXPERTS | {
        "rms_norm_eps": 1e-1, "full_attention_interval": 2, "mlp_only_layers": [], "norm_topk_prob": False,
        "partial_rotary_factor": 0.5}),
    "qwen3_next_dense": ("qwen3_next", _DELTA | _GATED_EXPERTS | {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "decoder_sparse_step": 2,
        "norm_topk_prob": True}),
    "olmo_hybrid": ("olmo_hybrid", _DELTA | {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3,
        "linear_num_key_heads": 4, "linear_value_head_dim": 16, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    "olmo_hybrid_no_rope": ("olmo_hybrid", _DELTA | {
        "layer_types": ["full_attention", "linear_attention"] * 2, "linear_allow_neg_eigval": False, "pad_token_id": 0,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 8, "rope_theta": None}),
    "kimi_linear": ("kimi_linear", SIZES | _LATENT | {
        "rms_norm_eps": 1e-2, "num_hidden_layers": 5, "linear_head_dim": 8, "linear_num_heads": 4,
        "linear_conv_kernel_dim": 3, "pad_token_id": 0,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] + ["linear_attention"] * 2,
        "mlp_layer_types": ["dense"] + ["sparse"] * 4}),
    "bailing_hybrid": ("bailing_hybrid", SIZES | _LATENT | {
        "rms_norm_eps": 1e-2, "num_hidden_layers": 5, "head_dim": 8, "short_conv_kernel_size": 3, "q_lora_rank": 12,
        "layer_group_size": 3, "first_k_dense_replace": 1, "pad_token_id": 0, "kda_lower_bound": -3.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5}}),
    "bailing_hybrid_unbounded": ("bailing_hybrid", SIZES | _LATENT | {
        "rms_norm_eps": 1e-2, "num_hidden_layers": 4, "head_dim": 8, "kda_safe_gate": False, "pad_token_id": 0,
        "layer_types": ["linear_attention", "full_attention"] * 2, "mlp_layer_types": ["sparse"] * 4,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "mscale": 1.0,
                            "mscale_all_dim": 0.5, "original_max_position_embeddings": 8}}),
}
