"""Decoders without experts."""

from typing import Any

from tests.hub.cases.sizes import GEMMA_4, HEAD_PARTS, SIZES

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name: (model type, what transformers is given)
    "gpt2": ("gpt2", {"vocab_size": 24, "n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": 40}),
    "llama": ("llama", SIZES), "llama_head_dim": ("llama", SIZES | {"head_dim": 6, "tie_word_embeddings": True}),
    "llama_llama3": ("llama", SIZES | {"rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8}}),
    "llama_linear": ("llama", SIZES | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama_yarn": ("llama", SIZES | {"head_dim": 8, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}}),
    "mistral": ("mistral", SIZES | {"sliding_window": 5}),
    "qwen2": ("qwen2", SIZES), "qwen3": ("qwen3", SIZES | {"head_dim": 6}),
    "qwen3_window": ("qwen3", SIZES | {"head_dim": 6, "use_sliding_window": True, "sliding_window": 5,
                                        "max_window_layers": 1, "num_hidden_layers": 3}),
    "gemma2": ("gemma2", SIZES | {
        "head_dim": 6, "sliding_window": 5, "query_pre_attn_scalar": 9, "num_hidden_layers": 3, "rms_norm_eps": 1e-6,
        "attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.5, "tie_word_embeddings": True}),
    "gemma2_uncapped": ("gemma2", SIZES | {
        "head_dim": 6, "sliding_window": 5, "query_pre_attn_scalar": 6, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "gemma3": ("gemma3_text", SIZES | {
        "head_dim": 6, "sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 9,
        "num_hidden_layers": 3, "rope_local_base_freq": 50.0, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}),
    "gemma3_scaled": ("gemma3_text", SIZES | {
        "head_dim": 6, "sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 6,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "llama_biased": ("llama", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "arcee": ("arcee", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", SIZES | {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "granite": ("granite", SIZES | {"embedding_multiplier": 6.0, "attention_multiplier": 0.3,
                                     "residual_multiplier": 0.22, "logits_scaling": 4.0, "mlp_bias": True}),
    "seed_oss": ("seed_oss", SIZES | {"head_dim": 6, "attention_out_bias": True, "pad_token_id": 0}),
    "ernie4_5": ("ernie4_5", SIZES | {"head_dim": 6, "use_bias": True}),
    "phi3": ("phi3", SIZES | {"sliding_window": 5, "pad_token_id": 0}),
    "phi3_partial": ("phi3", SIZES | {"hidden_size": 32, "partial_rotary_factor": 0.75, "pad_token_id": 0}),
    "phi3_longrope": ("phi3", SIZES | {
        "hidden_size": 32, "partial_rotary_factor": 0.75, "pad_token_id": 0, "max_position_embeddings": 64,
        "original_max_position_embeddings": 16, "rope_scaling": {
            "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 5.0, 9.0]}}),
    "phi3_longrope_long": ("phi3", SIZES | {
        "pad_token_id": 0, "original_max_position_embeddings": 8, "rope_scaling": {
            "type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0]}}),
    "llama_longrope": ("llama", SIZES | {
        "original_max_position_embeddings": 16, "rope_scaling": {
            "rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0]}}),
    "llama_longrope_long": ("llama", SIZES | {"rope_scaling": {
        "rope_type": "longrope", "original_max_position_embeddings": 8, "attention_factor": 1.3,
        "short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0]}}),
    "glm4": ("glm4", SIZES | {"head_dim": 8, "pad_token_id": 0}),
    "olmo2": ("olmo2", SIZES | {"pad_token_id": 0}),
    "olmo3": ("olmo3", SIZES | {
        "head_dim": 8, "num_hidden_layers": 3, "sliding_window": 5, "pad_token_id": 0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}}),
    "exaone4": ("exaone4", SIZES | {"head_dim": 6, "num_hidden_layers": 3, "sliding_window": 5,
                                     "sliding_window_pattern": 2, "pad_token_id": 0}),
    "ministral3": ("ministral3", SIZES | {"head_dim": 6, "sliding_window": 9, "pad_token_id": 0, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4, "mscale": 1.0,
        "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.7}}),
    "ministral": ("ministral", SIZES | {
        "head_dim": 6, "num_hidden_layers": 3, "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
    "hunyuan": ("hunyuan_v1_dense", SIZES | {"head_dim": 6, "attention_bias": True, "rope_scaling": {
        "type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0}}),
    "apertus": ("apertus", SIZES | {"head_dim": 6, "attention_bias": True, "pad_token_id": 0, "rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8}}),
    "nanochat": ("nanochat", SIZES | {"head_dim": 6, "final_logit_softcapping": 0.7, "attention_bias": True,
                                       "tie_word_embeddings": True, "pad_token_id": 0}),
    "olmo": ("olmo", SIZES | {"head_dim": 6, "clip_qkv": 0.4, "attention_bias": True, "pad_token_id": 0}),
    "glm": ("glm", SIZES | {"head_dim": 8, "pad_token_id": 0}),
    "gemma": ("gemma", SIZES | {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": True}),
    "starcoder2": ("starcoder2", SIZES | {"sliding_window": 5, "norm_epsilon": 1e-3, "head_dim": 6,
                                           "tie_word_embeddings": True}),
    "stablelm": ("stablelm", SIZES | {"hidden_size": 32, "partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "stablelm_parallel": ("stablelm", SIZES | {"partial_rotary_factor": 0.5, "qk_layernorm": True,
                                               "use_parallel_residual": True}),
    "helium": ("helium", SIZES | {"head_dim": 4, "attention_bias": True, "mlp_bias": True, "pad_token_id": 0}),
    "nemotron": ("nemotron", SIZES | {"head_dim": 8, "attention_bias": True, "mlp_bias": True, "norm_eps": 1e-3}),
    "llama_dynamic": ("llama", SIZES | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "cohere": ("cohere", SIZES | {"logit_scale": 0.3, "use_qk_norm": True, "pad_token_id": 0}),
    "cohere2": ("cohere2", SIZES | {
        "num_hidden_layers": 3, "sliding_window": 5, "sliding_window_pattern": 2, "logit_scale": 0.3,
        "attention_bias": True, "layer_norm_eps": 1e-3, "head_dim": 6, "tie_word_embeddings": True,
        "pad_token_id": 0}),
    "youtu": ("youtu", SIZES | HEAD_PARTS | {"q_lora_rank": 12, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "youtu_yarn": ("youtu", SIZES | HEAD_PARTS | {"q_lora_rank": None, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8,
        "mscale": 1.0, "mscale_all_dim": 0.7}}),
    "gemma4": ("gemma4_text", GEMMA_4 | {
        "num_hidden_layers": 4, "global_head_dim": 10, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
        "final_logit_softcapping": 1.5}),
    "gemma4_small": ("gemma4_text", GEMMA_4 | {  # as Gemma 4 E2B
        "num_hidden_layers": 6, "num_key_value_heads": 2, "global_head_dim": 10, "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 28, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
        "attention_bias": True, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] + [
            "sliding_attention", "full_attention"] + ["full_attention"]}),
    "gemma4_inputs": ("gemma4_text", GEMMA_4 | {
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 6,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 24, "tie_word_embeddings": False}),
    "exaone4_full": ("exaone4", SIZES | {"sliding_window": None, "layer_types": ["full_attention"] * 2,
                                          "pad_token_id": 0}),
}
