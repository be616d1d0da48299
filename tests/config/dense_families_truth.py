"""The shapes that transformers takes from config.json files of the dense types; see `families_truth`."""

import sys
from typing import Any

import torch
import transformers

ROTARY = ("rotary_emb", "pos_emb")
_UNSEEN = ("phi3", "ministral3", "starcoder2")  # which have one mask for all layers


def empty(c: Any) -> Any:
    """Return the model of a config, whose parameters have shapes alone."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(c)


def rotary(model: Any, c: Any) -> Any:
    """Return the rotary positions of a model, computed."""
    module = next(getattr(model.model, name) for name in ROTARY if hasattr(model.model, name))
    return getattr(sys.modules[type(model).__module__], type(module).__name__)(c)


def turns(module: Any, name: str = "") -> list[float]:
    """Return the frequencies of rotary positions, and the factor of each."""
    scale = getattr(module, f"{name}attention_scaling")
    return [*map(float, getattr(module, f"{name}inv_freq")), float(scale)]


def linear(module: Any, *names: str) -> Any:
    """Return the first of these matrices that a module has."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def epsilon(norm: Any) -> float:
    """Return the epsilon of a norm."""
    return getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", 1e-5)


def shape(c: Any) -> dict[str, Any]:
    """Return the shape of a model, as `dense_families.shape` does."""
    model, kind, heads = empty(c), c.model_type, c.num_attention_heads
    layer = model.model.layers[0]
    if kind == "youtu":
        return _latent(model, c)
    attention, mlp = layer.self_attn, layer.mlp
    down, width, out = linear(mlp, "down_proj", "c_proj", "fc2"), attention.head_dim, linear(attention, "o_proj")
    query = linear(attention, "q_proj", "qkv_proj")
    kv = ((query.out_features // width - heads) // 2 if hasattr(attention, "qkv_proj")
          else attention.k_proj.out_features // width)
    # What models do not check when they are made, and cannot compute with.
    assert heads % kv == 0 and width % 2 == 0 and out.in_features == heads * width
    assert not getattr(c, "use_bidirectional_attention", None)
    assert kv == c.num_key_value_heads
    table = model.model.embed_tokens
    windows = _windows(c, kind)
    found = {"vocab_size": table.num_embeddings, "layers": len(model.model.layers), "width": table.embedding_dim,
             "heads": heads, "kv": kv, "length": c.max_position_embeddings,
             "tied": bool(c.tie_word_embeddings and model._tied_weights_keys),
             "eps": epsilon(model.model.norm), "head_dim": width, "mlp": down.in_features,
             "biases": [module.bias is not None for module in (query, out, down)],
             "scores": float(attention.scaling), "cap": float(getattr(c, "attn_logit_softcapping", None) or 0),
             "activation": _activation(c), "turns": _turns(model, c), "windows": windows,
             "turning": [_turning(one.self_attn, kind, window) for one, window in zip(
                 model.model.layers, windows, strict=True)]}
    if kind == "phi3" and c.rope_parameters["rope_type"] == "longrope":  # longer texts have other positions
        found["length"] = min(c.max_position_embeddings, c.original_max_position_embeddings)
    return found | {"own": _own(model, c, kind, layer)}


def _latent(model: Any, c: Any) -> dict[str, Any]:
    table, layer = model.model.embed_tokens, model.model.layers[0]
    attention, down, positions = layer.self_attn, layer.mlp.down_proj, turns(rotary(model, c))
    assert c.num_key_value_heads == c.num_attention_heads and len(positions) == attention.qk_rope_head_dim // 2 + 1
    return {"vocab_size": table.num_embeddings, "layers": len(model.model.layers), "width": table.embedding_dim,
            "heads": c.num_attention_heads, "length": c.max_position_embeddings,
            "tied": bool(c.tie_word_embeddings and model._tied_weights_keys), "eps": epsilon(model.model.norm),
            "mlp": down.in_features,
            "parts": [attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim],
            "latents": [attention.q_lora_rank or 0, attention.kv_lora_rank], "scores": float(attention.scaling),
            "turns": positions}


def _activation(c: Any) -> str:
    name = c.hidden_activation if c.model_type == "gemma2" else c.hidden_act
    return {"swish": "silu"}.get(name, name)


def _turns(model: Any, c: Any) -> Any:
    module = rotary(model, c)
    if c.model_type != "olmo3":
        return turns(module)
    return {name.removesuffix("_attention"): turns(module, f"{name}_") for name in {*c.layer_types}}


def _windows(c: Any, kind: str) -> list[int]:
    window, layers = getattr(c, "sliding_window", None), c.num_hidden_layers
    if kind in _UNSEEN:
        return [window or 0] * layers
    if not hasattr(c, "layer_types") :
        return [0] * layers
    types = c.layer_types or ["full_attention"] * layers
    if kind not in ("smollm3", "olmo3", "exaone4", "gemma2", "cohere2", "ministral"):
        return [0] * layers
    assert len(types) == layers and (window or "sliding_attention" not in types)
    return [window if name == "sliding_attention" else 0 for name in types]


def _turning(attention: Any, kind: str, window: int) -> bool:
    if kind == "smollm3":
        return bool(attention.use_rope)
    if kind == "exaone4":
        return attention.sliding_window is None or attention.is_sliding
    return kind != "cohere2" or attention.sliding_window is not None


def _own(model: Any, c: Any, kind: str, layer: Any) -> dict[str, Any]:
    attention = layer.self_attn
    if kind == "granite":
        return {"embedding_multiplier": model.model.embedding_multiplier, "logits_scaling": c.logits_scaling,
                "residual_multiplier": layer.residual_multiplier}
    if kind in ("gemma2", "nanochat"):
        return {"logit_cap": float(c.final_logit_softcapping or 0)}
    if kind in ("cohere", "cohere2"):
        assert model.logit_scale is not None
        return {"logit_scale": model.logit_scale} | (
            {"qk_norm": bool(attention.use_qk_norm)} if kind == "cohere" else {})
    if kind == "olmo":
        return {"clip_qkv": float(c.clip_qkv or 0)}
    if kind == "stablelm":
        return {"qk_norm": attention.qk_layernorm, "parallel": layer.use_parallel_residual}
    if kind == "ministral3":
        return {"query_beta": float(c.rope_parameters["llama_4_scaling_beta"]),
                "query_len": c.rope_parameters["original_max_position_embeddings"]}
    if kind == "phi3":
        return {"rope_long_factor": [*map(float, c.rope_parameters.get("long_factor") or [])]}
    return {}
