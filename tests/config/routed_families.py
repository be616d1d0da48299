"""Draws config.json files of the routed types, and what jaxtrain takes them for; see `tests.config.families`."""

from typing import Any

import numpy as np

_MLPS = [None, None, None, ["dense", "sparse"], ["sparse", "sparse", "sparse"], ["sparse", "dense", "sparse", "sparse"]]
_EXPERTS = {"num_experts_per_tok": [2, 3], "moe_intermediate_size": [6], "norm_topk_prob": [True, False]}
_LATENT = {"num_key_value_heads": [2, 4, None], "kv_lora_rank": [12], "qk_nope_head_dim": [6], "qk_rope_head_dim": [4],
           "v_head_dim": [8], "q_lora_rank": [12, None], "n_routed_experts": [8], "n_shared_experts": [1, 2],
           "first_k_dense_replace": [0, 1], "n_group": [4, 1, None], "topk_group": [2, 1],
           "routed_scaling_factor": [2.5, 1.5], "rms_norm_eps": [1e-6, 1e-5]} | _EXPERTS
_MULTIPLIED = {"embedding_multiplier": [6.0], "attention_multiplier": [0.3], "residual_multiplier": [0.22],
               "logits_scaling": [4.0], "attention_bias": [True, False], "num_local_experts": [4],
               "num_experts_per_tok": [2], "head_dim": [6, None]}


def _long_rope(given: dict[str, Any], rng: np.random.Generator) -> Any:
    """Return parameters of LongRoPE, a factor for each pair that turns, or others, or none."""
    pairs = given.get("hidden_size", 4096) // given.get("num_attention_heads", 32) // 2
    turn = [1.0, 1.2][rng.integers(2)]
    found = {"rope_type" if rng.random() < 0.5 else "type": "longrope" if rng.random() < 0.8 else "su",
             "short_factor": [1.0 + n / 4 for n in range(pairs)], "long_factor": [2.0 + n for n in range(pairs)],
             "short_mscale": turn, "long_mscale": turn if rng.random() < 0.8 else 1.4}
    for key, value in (("rope_theta", 30.0), ("factor", 4.0), ("attention_factor", 1.25),
                       ("original_max_position_embeddings", 8), ("original_max_position_embeddings", 64)):
        found |= {key: value} if rng.random() < 0.3 else {}
    return [None, {"type": "default"}, {"rope_type": "linear", "factor": 2.0}, found, found, found, found][
        rng.integers(7)]


# The keys that the types have beside those of shape and rotary positions, with values to draw from.
DRAWS: dict[str, dict[str, Any]] = {
    "qwen2_moe": _EXPERTS | {
        "use_sliding_window": [True, False, False], "sliding_window": [3, 5, None], "max_window_layers": [0, 1, 9],
        "layer_types": "layers", "num_experts": [4], "shared_expert_intermediate_size": [8, 10], "qkv_bias": [False],
        "decoder_sparse_step": [1, 2], "mlp_only_layers": [[], [0], [1], None]},
    "granitemoe": _MULTIPLIED, "granitemoeshared": _MULTIPLIED | {"shared_intermediate_size": [0, 8]},
    "deepseek_v2": _LATENT | {"topk_method": ["greedy", "group_limited_greedy", "noaux_tc"]},
    "ernie4_5_moe": {
        "head_dim": [6], "moe_num_experts": [8], "moe_k": [2, 3], "moe_intermediate_size": [6],
        "moe_num_shared_experts": [0, 1, 2], "moe_layer_start_index": [0, 1, 2], "moe_layer_interval": [1, 2],
        "moe_layer_end_index": [-1, 3, 2], "use_bias": [False, True]},
    "minimax_m2": {"head_dim": [8], "num_local_experts": [8], "num_experts_per_tok": [2], "rotary_dim": [4, 8, None],
                   "partial_rotary_factor": [0.5, 1.0]},
    "afmoe": {
        "head_dim": [6], "num_experts": [8], "num_experts_per_tok": [2, 3], "moe_intermediate_size": [6],
        "num_shared_experts": [1, 2], "num_dense_layers": [0, 1], "route_scale": [2.8], "layer_types": "layers",
        "global_attn_every_n_layers": [1, 2, 3], "sliding_window": [3, 5], "mup_enabled": [True, False],
        "attention_bias": [False, True]},
    "hunyuan_v1_moe": {
        "head_dim": [6], "num_experts": [8], "moe_topk": [1, 2, [2, 2], [2, 3]], "attention_bias": [True, False],
        "rope_scaling": [{"type": "dynamic", "alpha": 50.0, "factor": 1.0}, {"type": "dynamic", "factor": 2.0}, None]},
    "mistral4": _LATENT | {"rope_scaling": [None], "rope_parameters": [
        None, {"rope_type": "default"}, {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8,
                                         "llama_4_scaling_beta": 0.3},
        {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0,
         "rope_theta": 30.0, "mscale": 1.0, "mscale_all_dim": 0.5, "partial_rotary_factor": 0.4}]},
    "llama4_text": {
        "head_dim": [6], "intermediate_size_mlp": [20], "num_local_experts": [4], "num_experts_per_tok": [1, 2],
        "interleave_moe_layer_step": [1, 2], "moe_layers": [None, [0, 1], [1, 3]], "no_rope_layer_interval": [2, 3],
        "no_rope_layers": [[], None, [1, 1, 1], [1, 0, 1, 0]], "attention_chunk_size": [3, 5, None],
        "use_qk_norm": [True, False], "attention_bias": [True], "floor_scale": [4], "attn_scale": [0.3],
        "attn_temperature_tuning": [True, False]},
    "olmoe": _EXPERTS | {"num_experts": [4], "clip_qkv": [None, None, 2.0]},
    "phimoe": {
        "num_key_value_heads": [1, 2], "num_local_experts": [4, 8], "num_experts_per_tok": [2, 2, 2, 3],
        "attention_bias": [True, False], "lm_head_bias": [True, False], "router_jitter_noise": [0.1, 0.01],
        "sliding_window": [3, None], "rope_scaling": _long_rope, "rope_parameters": _long_rope,
        "original_max_position_embeddings": [8, 16, 64], "head_dim": [8]},
    "flex_olmo": _EXPERTS | {"num_experts": [4], "head_dim": [6]},
    "glm4_moe_lite": _LATENT | {"num_key_value_heads": [4, 2], "num_attention_heads": [4], "n_group": [4, 1],
                                "mlp_layer_types": _MLPS},
    "hy_v3": _EXPERTS | {"head_dim": [6], "num_experts": [8], "num_shared_experts": [1, 2], "attention_bias": [True],
                         "router_scaling_factor": [2.8], "mlp_layer_types": _MLPS},
    "solar_open": _EXPERTS | {
        "head_dim": [6, 8], "n_routed_experts": [8], "n_shared_experts": [1, 2], "n_group": [4, 1], "topk_group": [1],
        "routed_scaling_factor": [2.5], "attention_bias": [True, False], "partial_rotary_factor": [1.0, 0.5]},
    "exaone_moe": _EXPERTS | {
        "head_dim": [6], "num_experts": [8], "num_shared_experts": [1, 2], "first_k_dense_replace": [0, 1],
        "layer_types": "layers", "sliding_window": [3, 5], "sliding_window_pattern": [2, 3], "n_group": [4, 1],
        "topk_group": [1], "routed_scaling_factor": [2.5], "mlp_layer_types": _MLPS},
    "glm4_moe": _EXPERTS | {
        "head_dim": [6, 8], "n_routed_experts": [8], "n_shared_experts": [1, 2], "n_group": [4, 1], "topk_group": [1],
        "routed_scaling_factor": [2.5], "attention_bias": [True, False], "use_qk_norm": [True, False],
        "first_k_dense_replace": [0, 1], "partial_rotary_factor": [1.0, 0.5, 0.25, None], "num_key_value_heads": [1, 2],
        "num_nextn_predict_layers": [1, 0]},
    "dots1": _EXPERTS | {
        "head_dim": [6], "n_routed_experts": [8], "n_shared_experts": [1, 2], "n_group": [4, 1], "topk_group": [1],
        "routed_scaling_factor": [2.5], "first_k_dense_replace": [0, 1], "attention_bias": [False, False, False, True],
        "sliding_window": [3, 5, None], "max_window_layers": [0, 0, 1, 9], "layer_types": "layers"},
}
KINDS = tuple(DRAWS)


def shape(c: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the shape of a model, as `routed_families_truth.shape` does."""
    from jaxtrain.models.attention.rotary import scaled_frequencies, score_factor

    e, layers = c.experts, range(c.num_layers)
    sparse = [n >= e.dense_layers and (n - e.dense_layers + 1) % e.every == 0 for n in layers]
    turns, scale = scaled_frequencies(c, c.rotary_width)
    found = {"vocab_size": c.vocab_size, "layers": c.num_layers, "width": c.embed_dim, "heads": c.num_heads,
             "kv": c.num_kv_heads, "length": c.max_seq_len, "tied": c.tied_embeddings, "eps": c.norm_eps,
             "head_dim": c.head_dim, "turns": [*map(float, turns), float(scale)], "experts": sparse,
             "count": e.num, "chosen": e.per_token, "expert_mlp": e.mlp_dim, "shared": e.shared_width,
             "groups": [e.groups, e.groups_used] if e.groups > 1 else None,
             "weights": [e.score, e.normalized, e.scale, e.bias_rate > 0], "mlp": None if all(sparse) else c.mlp_dim,
             "windows": _windows(c)}
    own: dict[str, Any] = {key: getattr(c, key) for key in (
        "qkv_bias", "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
        "attention_bias", "use_qk_norm", "query_temperature", "router_jitter")
        if hasattr(c, key)}
    if c.name == "phimoe":
        own |= {"head_bias": c.head_bias, "rope_long_factor": c.rope_long_factor}
    if c.name == "afmoe":
        own["scaled_embeddings"] = c.scaled_embeddings
    if c.latent_attention:
        own |= {"turning": c.rope_head_dim, "value": c.value_head_dim, "latents": [c.q_rank, c.kv_rank],
                "scores": score_factor(c)}
    if own.get("query_temperature"):
        own["temperature_len"] = getattr(c, "query_temperature_len", c.rope_original_len)
    return found | {"own": own}


def _windows(c: Any) -> list[int]:
    if c.name == "dots1":
        return [c.window if n >= c.global_first else 0 for n in range(c.num_layers)]
    every = getattr(c, "no_rope_every" if c.name == "llama4" else "global_every", 0)
    return [0 if every and (n + 1) % every == 0 else c.window for n in range(c.num_layers)]
