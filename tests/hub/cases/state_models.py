"""Decoders with Mamba-2 or short convolutions in some or all layers."""

from typing import Any

from tests.hub.cases.sizes import MULTIPLIED, SIZES

_MAMBA2 = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8,
           "state_size": 6, "n_groups": 2, "pad_token_id": 0}
_NEMOTRON = SIZES | {"head_dim": 6, "mamba_num_heads": 4, "mamba_head_dim": 6, "ssm_state_size": 5, "n_groups": 2,
                     "pad_token_id": 0}
_MAMBA = SIZES | {"num_hidden_layers": 4, "mamba_n_heads": 4, "mamba_d_state": 6, "mamba_d_conv": 3,
                  "time_step_limit": [0.1, 1.0]}
_FALCON = {"embedding_multiplier": 5.0, "lm_head_multiplier": 0.3, "key_multiplier": 0.4,
           "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.25,
           "ssm_out_multiplier": 0.7, "mlp_multipliers": [0.9, 0.6], "ssm_multipliers": [0.7, 1.5, 0.8, 1.2, 0.6]}
_LFM2 = {key: value for key, value in SIZES.items() if key != "rms_norm_eps"} | {
    "num_hidden_layers": 4, "head_dim": 8, "conv_L_cache": 3, "pad_token_id": None}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name: (model type, what transformers is given)
    "mamba2": ("mamba2", _MAMBA2 | {"use_bias": True, "time_step_limit": [0.02, 1.0]}),
    "mamba2_plain": ("mamba2", _MAMBA2 | {"n_groups": 1, "use_conv_bias": False, "tie_word_embeddings": True,
                                           "conv_kernel": 3}),
    "nemotron_h": ("nemotron_h", _NEMOTRON | {"hybrid_override_pattern": "M-*M-*", "use_bias": True, "mlp_bias": True}),
    "nemotron_h_moe": ("nemotron_h", _NEMOTRON | {
        "hybrid_override_pattern": "ME*EME*E", "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 6, "moe_shared_expert_intermediate_size": 10, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5, "time_step_min": 0.3}),
    "nemotron_h_latent": ("nemotron_h", _NEMOTRON | {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"] * 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 6, "moe_shared_expert_intermediate_size": 10, "moe_latent_size": 12,
        "norm_topk_prob": False, "mlp_bias": True}),
    "granitemoehybrid": ("granitemoehybrid", _MAMBA | MULTIPLIED | {
        "num_hidden_layers": 6,
        "layer_types": ["mamba", "attention", "mamba"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 12, "attention_bias": True, "mamba_proj_bias": True, "mamba_n_groups": 2,
        "position_embedding_type": "rope", "pad_token_id": 0}),
    "granitemoehybrid_dense": ("granitemoehybrid", _MAMBA | MULTIPLIED | {
        "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 12,
        "mamba_conv_bias": False, "position_embedding_type": "nope", "tie_word_embeddings": True, "pad_token_id": 0}),
    "bamba": ("bamba", _MAMBA | {"head_dim": 8, "attn_layer_indices": [1, 3], "attention_bias": True,
                                 "mlp_bias": True, "mamba_proj_bias": True, "pad_token_id": None}),
    "falcon_h1": ("falcon_h1", _MAMBA | _FALCON | {
        "num_hidden_layers": 2, "mamba_d_ssm": 24, "mamba_n_groups": 2, "mamba_rms_norm": True,
        "mamba_norm_before_gate": True, "projectors_bias": True, "mlp_bias": True, "pad_token_id": None}),
    "falcon_h1_gate": ("falcon_h1", _MAMBA | _FALCON | {
        "num_hidden_layers": 2, "mamba_d_ssm": 24, "mamba_proj_bias": True, "attention_bias": True,
        "pad_token_id": None}),
    "lfm2": ("lfm2", _LFM2 | {"layer_types": ["conv", "full_attention"] * 2, "conv_bias": True,
                              "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.5, "rope_theta": 100.0}),
    "lfm2_moe": ("lfm2_moe", _LFM2 | {
        "num_hidden_layers": 5, "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
        "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
        "routed_scaling_factor": 1.5}),
}
