"""Decoders with routed experts."""

from typing import Any

from tests.hub.cases.sizes import LATENT, MULTIPLIED, ROUTED, SIZES

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
    "deepseek_v3_plain": ("deepseek_v3", SIZES | LATENT | {"q_lora_rank": None}),
}
