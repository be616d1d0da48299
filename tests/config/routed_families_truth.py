"""The shapes that transformers takes from config.json files of the routed types; see `families_truth`."""

import importlib
from typing import Any

import torch

_CLASSES = {"qwen2_moe": "Qwen2Moe", "granitemoe": "GraniteMoe", "granitemoeshared": "GraniteMoeShared",
            "deepseek_v2": "DeepseekV2", "ernie4_5_moe": "Ernie4_5_Moe", "minimax_m2": "MiniMaxM2", "afmoe": "Afmoe",
            "hunyuan_v1_moe": "HunYuanMoEV1", "mistral4": "Mistral4", "llama4_text": "Llama4Text",
            "olmoe": "Olmoe", "flex_olmo": "FlexOlmo", "glm4_moe_lite": "Glm4MoeLite", "hy_v3": "HYV3",
            "solar_open": "SolarOpen", "exaone_moe": "ExaoneMoe", "glm4_moe": "Glm4Moe",
            "dots1": "Dots1", "phimoe": "Phimoe"}
_SIGMOID = ("minimax_m2", "afmoe", "llama4_text", "glm4_moe_lite", "hy_v3", "solar_open", "exaone_moe", "glm4_moe",
            "dots1")
_NORMALIZED = ("qwen2_moe", "mistral4", "olmoe", "flex_olmo", "glm4_moe_lite", "solar_open", "exaone_moe",
               "glm4_moe", "dots1")
_ONE_WIDTH = ("phimoe", "granitemoe", "granitemoeshared", "minimax_m2", "hunyuan_v1_moe", "llama4_text", "olmoe",
              "flex_olmo")


def _first(c: Any, *names: str) -> Any:
    return next((getattr(c, name) for name in names if hasattr(c, name)), None)


def shape(c: Any) -> dict[str, Any]:
    """Return the shape of a model, as `routed_families.shape` does."""
    kind, heads = c.model_type, c.num_attention_heads
    folder = kind.removesuffix("_text")
    there = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    rotary = getattr(there, f"{_CLASSES[kind]}RotaryEmbedding")(c)
    latent = kind in ("deepseek_v2", "mistral4", "glm4_moe_lite")
    head_dim = c.qk_nope_head_dim if latent else getattr(c, "head_dim", None) or c.hidden_size // heads
    sparse = _sparse(c, kind)
    assert any(sparse)
    chosen = _first(c, "moe_k", "moe_topk", "num_experts_per_tok")
    chosen = chosen[0] if isinstance(chosen, list) and len({*chosen}) == 1 else chosen
    count = _first(c, "moe_num_experts", "n_routed_experts", "num_local_experts", "num_experts")
    groups = [c.n_group or 1, c.topk_group or 1] if hasattr(c, "n_group") else [1, 1]
    groups = [1, 1] if kind == "deepseek_v2" and c.topk_method == "greedy" else groups
    assert kind != "deepseek_v2" or c.topk_method != "noaux_tc"
    assert type(chosen) is int and chosen <= count // groups[0] * groups[1] and heads % c.num_key_value_heads == 0
    assert count % groups[0] == 0 and groups[1] <= groups[0] and getattr(c, "clip_qkv", None) is None
    expert = c.intermediate_size if kind in _ONE_WIDTH else c.moe_intermediate_size
    found = {"vocab_size": c.vocab_size, "layers": c.num_hidden_layers, "width": c.hidden_size, "heads": heads,
             "kv": heads if latent else c.num_key_value_heads, "length": c.max_position_embeddings,
             "tied": bool(c.tie_word_embeddings), "eps": c.rms_norm_eps, "head_dim": head_dim,
             "turns": [*map(float, rotary.inv_freq), float(rotary.attention_scaling)], "experts": sparse,
             "count": count, "chosen": chosen, "expert_mlp": expert, "shared": _shared(c, kind, expert),
             "groups": groups if groups[0] > 1 else None, "weights": _weights(c, kind),
             "mlp": None if all(sparse) else _first(c, "intermediate_size_mlp", "intermediate_size"),
             "windows": _windows(c, kind)}
    if kind == "phimoe":
        found |= _short_texts(c, rotary)
    return found | {"own": _own(c, kind, there)}


def _short_texts(c: Any, rotary: Any) -> dict[str, Any]:
    """Return what counts up to Phi-3.5-MoE's original length: longer texts have another factor."""
    assert c.num_experts_per_tok == 2  # which it has whatever a file says
    positions = c.rope_parameters
    length = c.max_position_embeddings
    if positions["rope_type"] != "default":
        length = min(length, positions["original_max_position_embeddings"])
    cosine, _ = rotary(torch.zeros(1), torch.tensor([[0, length - 1]]))
    assert len(rotary.inv_freq) * 2 == (getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)
    return {"length": length, "turns": [*map(float, rotary.inv_freq), float(cosine[0, 0, 0])]}


def _sparse(c: Any, kind: str) -> list[bool]:
    layers = range(c.num_hidden_layers)
    if kind == "qwen2_moe":
        return [n not in c.mlp_only_layers and (n + 1) % c.decoder_sparse_step == 0 for n in layers]
    if kind == "ernie4_5_moe":
        return [(n + 1) % c.moe_layer_interval == 0 and c.moe_layer_start_index <= n <= c.moe_layer_end_index
                for n in layers]
    if kind == "llama4_text":
        return [n in c.moe_layers for n in layers]
    if hasattr(c, "mlp_layer_types"):
        assert len(c.mlp_layer_types) == c.num_hidden_layers
        return [name == "sparse" for name in c.mlp_layer_types]
    return [n >= (_first(c, "first_k_dense_replace", "num_dense_layers") or 0) for n in layers]


def _shared(c: Any, kind: str, expert: int) -> int:
    if kind in ("llama4_text", "hunyuan_v1_moe"):
        return expert
    width = _first(c, "shared_expert_intermediate_size", "shared_intermediate_size")
    return width if width is not None else expert * (_first(c, "n_shared_experts", "moe_num_shared_experts",
                                                            "num_shared_experts") or 0)


def _weights(c: Any, kind: str) -> list[Any]:
    if kind == "phimoe":
        return ["sparse_mixer", False, 1.0, False]
    sigmoid = kind in _SIGMOID
    biased = (sigmoid and kind != "llama4_text") or kind == "ernie4_5_moe"
    normalized = c.norm_topk_prob if kind in _NORMALIZED else kind not in ("deepseek_v2", "llama4_text")
    return ["sigmoid" if sigmoid else "softmax", normalized,
            float(_first(c, "routed_scaling_factor", "route_scale", "router_scaling_factor") or 1.0), biased]


def _windows(c: Any, kind: str) -> list[int]:
    if kind == "phimoe":
        return [c.sliding_window or 0] * c.num_hidden_layers
    if kind not in ("qwen2_moe", "afmoe", "llama4_text", "exaone_moe", "dots1"):
        return [0] * c.num_hidden_layers
    if kind == "llama4_text":
        assert len(c.layer_types) == len(c.no_rope_layers) == c.num_hidden_layers
        return [(c.attention_chunk_size or 0) * (name == "chunked_attention") for name in c.layer_types]
    assert len(c.layer_types) == c.num_hidden_layers
    assert c.sliding_window or "sliding_attention" not in c.layer_types
    return [c.sliding_window * (name == "sliding_attention") if c.sliding_window else 0 for name in c.layer_types]


def _own(c: Any, kind: str, there: Any) -> dict[str, Any]:
    own = {key: getattr(c, key) for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier",
                                            "logits_scaling") if hasattr(c, key)}
    if kind in ("granitemoe", "granitemoeshared", "hunyuan_v1_moe", "llama4_text", "hy_v3", "solar_open",
                "glm4_moe"):
        own["attention_bias"] = c.attention_bias
    if kind == "phimoe":
        longrope = c.rope_parameters["rope_type"] != "default"
        own = {"attention_bias": c.attention_bias, "head_bias": c.lm_head_bias, "router_jitter": c.router_jitter_noise,
               "rope_long_factor": c.rope_parameters["long_factor"] if longrope else []}
    if kind == "qwen2_moe":
        own["qkv_bias"] = c.qkv_bias
    if kind == "afmoe":
        own["scaled_embeddings"] = c.mup_enabled
    if kind == "llama4_text":
        own |= {"use_qk_norm": c.use_qk_norm, "query_temperature": c.attn_scale if c.attn_temperature_tuning else 0.0}
        own |= {"temperature_len": c.floor_scale} if own["query_temperature"] else {}
    if kind == "glm4_moe":
        own["use_qk_norm"] = c.use_qk_norm
    if kind == "solar_open":
        own["use_qk_norm"] = False
    if kind in ("deepseek_v2", "mistral4", "glm4_moe_lite"):
        assert c.num_attention_heads == c.num_key_value_heads
        attention = getattr(there, f"{_CLASSES[kind]}Attention")(c, 0)
        own |= {"turning": c.qk_rope_head_dim, "value": c.v_head_dim, "latents": [c.q_lora_rank or 0, c.kv_lora_rank],
                "scores": float(attention.scaling) * (c.qk_nope_head_dim + c.qk_rope_head_dim) ** 0.5}
    if kind == "mistral4":
        own["query_temperature"] = c.rope_parameters["llama_4_scaling_beta"]
        own |= ({"temperature_len": c.rope_parameters["original_max_position_embeddings"]}
                if own["query_temperature"] else {})
        assert there.apply_rotary_pos_emb and len(there.Mistral4RotaryEmbedding(c).inv_freq) == c.qk_rope_head_dim // 2
    return own
