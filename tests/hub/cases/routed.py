"""Decoders with routed experts."""

from typing import Any

from tests.hub.cases.sizes import GEMMA_4, LATENT, MULTIPLIED, ROUTED, SIZES

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name: (model type, what transformers is given)
    "mixtral": ("mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": ("qwen3_moe", SIZES | {
        "head_dim": 6, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": True,
        "mlp_only_layers": [0], "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5,
        "max_window_layers": 2}),
    "qwen3_moe_sparse": ("qwen3_moe", SIZES | {
        "head_dim": 6, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 6, "norm_topk_prob": False,
        "decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "deepseek_v3": ("deepseek_v3", SIZES | LATENT | {"q_lora_rank": 12, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "gpt_oss": ("gpt_oss", SIZES | {
        "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "num_hidden_layers": 3,
        "swiglu_limit": 0.8, "swiglu_alpha": 1.5, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 4.0,
            "beta_slow": 1.0, "truncate": False}}),
    "gpt_oss_plain": ("gpt_oss", SIZES | {
        "head_dim": 6, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 3,
        "layer_types": ["full_attention", "full_attention"], "rope_scaling": {"rope_type": "default"}}),
    "glm4_moe": ("glm4_moe", SIZES | ROUTED | {"head_dim": 8, "attention_bias": True, "use_qk_norm": True}),
    "dots1": ("dots1", SIZES | ROUTED | {"head_dim": 6, "max_window_layers": 0, "sliding_window": 5}),
    "qwen2_moe": ("qwen2_moe", SIZES | {
        "head_dim": 6, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 6,
        "shared_expert_intermediate_size": 10, "mlp_only_layers": [0], "num_hidden_layers": 3}),
    "qwen2_moe_sparse": ("qwen2_moe", SIZES | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 8,
        "decoder_sparse_step": 2, "num_hidden_layers": 4, "norm_topk_prob": True, "qkv_bias": False,
        "use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention"] * 4}),
    "granitemoe": ("granitemoe", SIZES | MULTIPLIED | {
        "head_dim": 6, "num_local_experts": 8, "num_experts_per_tok": 3, "attention_bias": True}),
    "granitemoeshared": ("granitemoeshared", SIZES | MULTIPLIED | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 12}),
    "kimi_k2": ("kimi_k2", SIZES | LATENT | {
        "num_hidden_layers": 2, "n_routed_experts": 384, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
        "n_shared_experts": 1, "routed_scaling_factor": 2.827, "q_lora_rank": 12, "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 1.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek_v2": ("deepseek_v2", SIZES | LATENT | {
        "q_lora_rank": 12, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0, "norm_topk_prob": False,
        "rms_norm_eps": 1e-5, "num_experts_per_tok": 3, "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32, "beta_slow": 1,
            "mscale": 0.707, "mscale_all_dim": 0.707}}),
    "deepseek_v2_lite": ("deepseek_v2", SIZES | LATENT | {
        "q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.0, "first_k_dense_replace": 0,
        "n_group": None, "topk_group": None, "num_hidden_layers": 2, "norm_topk_prob": False}),
    "ernie4_5_moe": ("ernie4_5_moe", SIZES | {
        "head_dim": 6, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 6, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1, "num_hidden_layers": 3, "pad_token_id": 0}),
    "ernie4_5_moe_sparse": ("ernie4_5_moe", SIZES | {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 6, "moe_num_shared_experts": 0,
        "moe_layer_start_index": 0, "moe_layer_interval": 2, "num_hidden_layers": 4, "pad_token_id": 0}),
    "minimax_m2": ("minimax_m2", SIZES | {
        "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 4, "pad_token_id": 0}),
    "afmoe": ("afmoe", SIZES | {
        "head_dim": 6, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 6, "num_shared_experts": 1,
        "num_dense_layers": 1, "route_scale": 2.8, "num_hidden_layers": 4, "global_attn_every_n_layers": 2,
        "sliding_window": 5, "mup_enabled": True}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", SIZES | {
        "head_dim": 6, "num_experts": 8, "moe_topk": [3, 3], "attention_bias": True, "rope_scaling": {
            "type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
            "mscale_all_dim": 1.0}}),
    "mistral4": ("mistral4", SIZES | LATENT | {
        "q_lora_rank": 12, "n_shared_experts": 1, "pad_token_id": 0, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 4,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}}),
    "llama4": ("llama4_text", SIZES | {
        "head_dim": 6, "intermediate_size": 6, "intermediate_size_mlp": 20, "num_local_experts": 8,
        "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0], "attention_chunk_size": 5, "floor_scale": 3, "attn_scale": 0.4,
        "pad_token_id": 0}),
    "llama4_chunks": ("llama4_text", SIZES | {
        "head_dim": 8, "intermediate_size": 6, "num_local_experts": 4, "num_experts_per_tok": 1, "num_hidden_layers": 4,
        "no_rope_layers": [1] * 4, "attention_chunk_size": 4, "use_qk_norm": False, "attention_bias": True,
        "pad_token_id": 0, "rope_scaling": {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8}}),
    "olmoe": ("olmoe", SIZES | {"num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": 0}),
    "flex_olmo": ("flex_olmo", SIZES | {
        "head_dim": 6, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "pad_token_id": 0}),
    "phimoe": ("phimoe", SIZES | {
        "num_local_experts": 8, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True,
        "router_jitter_noise": 0.4, "sliding_window": 5, "original_max_position_embeddings": 32, "rope_scaling": {
            "type": "longrope", "short_factor": [1.1, 1.3], "long_factor": [2.0, 4.0], "short_mscale": 1.2,
            "long_mscale": 1.2, "original_max_position_embeddings": 32}}),
    "phimoe_plain": ("phimoe", SIZES | {
        "head_dim": 6, "num_local_experts": 4, "router_jitter_noise": 0.01, "tie_word_embeddings": True}),
    "glm4_moe_lite": ("glm4_moe_lite", {key: value for key, value in (SIZES | LATENT).items() if key not in (
        "first_k_dense_replace",)} | {"q_lora_rank": 12, "n_shared_experts": 1, "rms_norm_eps": 1e-5}),
    "hy_v3": ("hy_v3", SIZES | {
        "head_dim": 6, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 6, "num_shared_experts": 1,
        "attention_bias": True, "num_hidden_layers": 3}),
    "solar_open": ("solar_open", {key: value for key, value in (SIZES | ROUTED).items() if key not in (
        "first_k_dense_replace",)} | {"head_dim": 6, "attention_bias": True, "num_hidden_layers": 2}),
    "exaone_moe": ("exaone_moe", SIZES | {
        "head_dim": 6, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "num_shared_experts": 2,
        "n_group": 4, "topk_group": 2, "num_hidden_layers": 4, "sliding_window": 5, "sliding_window_pattern": 2,
        "pad_token_id": 0}),
    "deepseek_v3_plain": ("deepseek_v3", SIZES | LATENT | {"q_lora_rank": None}),
    "gemma4_moe": ("gemma4_text", GEMMA_4 | {  # as Gemma 4 26B-A4B
        "num_hidden_layers": 4, "global_head_dim": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 6}),
}
