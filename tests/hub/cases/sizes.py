"""Keys that the tiny models of many types share."""

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 20, "max_position_embeddings": 40, "rms_norm_eps": 1e-5, "rope_theta": 100.0,
    "tie_word_embeddings": False}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "num_hidden_layers": 3,
    "norm_topk_prob": True}
HEAD_PARTS: dict[str, Any] = {"num_key_value_heads": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 6,
                              "qk_rope_head_dim": 4, "v_head_dim": 8, "rms_norm_eps": 1e-6}
LATENT = ROUTED | HEAD_PARTS
MULTIPLIED: dict[str, Any] = {"embedding_multiplier": 6.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22,
                              "logits_scaling": 4.0}
GEMMA_4: dict[str, Any] = {key: value for key, value in SIZES.items() if key != "rope_theta"} | {
    "num_key_value_heads": 4, "head_dim": 6, "sliding_window": 5, "layer_types": [
        "sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}}
