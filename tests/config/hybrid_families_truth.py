"""The shapes that transformers takes from config.json files of hybrids; see `families_truth`."""

import math
from typing import Any

from tests.config.dense_families_truth import ROTARY, empty, epsilon, linear, rotary, turns

_NAMES = {"full_attention": "attention", "linear_attention": "states", "conv": "convolution", "moe": "experts",
          "mlp": "mlp", "hybrid": "both"}
_LATENT = ("kimi_linear", "bailing_hybrid")


def shape(c: Any) -> dict[str, Any]:
    """Return the shape of a model, as `hybrid_families.shape` does."""
    model, kind = empty(c), c.model_type
    body = getattr(model, "model", None) or model.backbone
    layers, table = [*body.layers], model.get_input_embeddings()
    assert len(layers) == c.num_hidden_layers
    kinds = [_NAMES[name] for name in getattr(c, "layers_block_type", None) or c.layer_types]
    assert len(kinds) == len(layers)
    fed = [next((getattr(one, name) for name in ("mlp", "feed_forward", "shared_mlp", "mixer") if hasattr(one, name)),
                None) for one in layers]
    sparse = [hasattr(one, "experts") or getattr(layer, "block_sparse_moe", None) is not None
              for one, layer in zip(fed, layers, strict=True)]
    norm = next(getattr(body, name) for name in ("norm", "norm_f", "final_layernorm", "embedding_norm")
                if hasattr(body, name))
    found: dict[str, Any] = {
        "vocab_size": table.num_embeddings, "layers": len(layers), "width": table.embedding_dim,
        "tied": bool(c.tie_word_embeddings and model._tied_weights_keys), "eps": epsilon(norm),
        "kinds": kinds, "sparse": sparse,
        "length": None if kind == "mamba2" else c.max_position_embeddings}
    mixers = [_mixer(layer, name) for layer, name in zip(layers, kinds, strict=True)]
    for name, summary in (("states", _states), ("attention", _attention)):
        these = [mixer for mixer, one in zip(mixers, kinds, strict=True) if one in (name, "both")]
        if these:
            module = these[0][0 if name == "states" else -1]
            found[name] = summary(module, c, model)
    if "convolution" in kinds:
        module = mixers[kinds.index("convolution")][0]
        assert (module.conv.bias is None) == (module.in_proj.bias is None) == (module.out_proj.bias is None)
        found["convolution"] = [module.conv.kernel_size[0], module.conv.bias is not None]
    if any(sparse):
        found["experts"] = _experts(fed[sparse.index(True)], c, layers[sparse.index(True)])
    dense = [one for one, has, name in zip(fed, sparse, kinds, strict=True)
             if not has and (kind != "nemotron_h" or name == "mlp")]
    if dense and kind != "mamba2":
        down = linear(dense[0], "down_proj", "w2", "output_linear")
        found["mlp"] = [down.in_features, down.bias is not None]
    return found | {"own": _own(model, c, layers[0])}


def _mixer(layer: Any, name: str) -> list[Any]:
    """Return what a layer has of states or a convolution, and of attention."""
    names = ("linear_attn", "mamba", "conv", "self_attn", "mixer")
    return [getattr(layer, one) for one in names if getattr(layer, one, None) is not None]


def _states(module: Any, c: Any, model: Any) -> dict[str, Any]:
    conv = module.q_conv1d if hasattr(module, "q_conv1d") else module.conv1d
    if c.model_type in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"):
        assert module.num_v_heads % module.num_k_heads == 0
        beta = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0
        return {"heads": module.num_v_heads, "key_heads": module.num_k_heads, "key": module.head_k_dim,
                "value": module.head_v_dim, "conv": conv.kernel_size[0], "beta": beta, "bound": 0.0}
    if c.model_type in _LATENT:
        gate = module.forget_gate
        bound = float(gate.lower_bound) if getattr(gate, "safe_gate", False) else 0.0
        return {"heads": module.num_heads, "key_heads": module.num_heads, "key": module.head_dim,
                "value": module.head_dim, "conv": conv.kernel_size[0], "beta": 1.0, "bound": bound}
    least, largest = module.time_step_limit
    assert module.num_heads % module.n_groups == 0 and least <= largest
    norm = "after_gate"
    if c.model_type == "falcon_h1":
        norm = "none" if not module.mamba_rms_norm else "before_gate" if module.norm.norm_before_gate else norm
    return {"heads": module.num_heads, "head_dim": module.head_dim, "groups": module.n_groups,
            "dim": module.ssm_state_size, "conv": conv.kernel_size[0],
            "steps": [float(least), 0.0 if math.isinf(largest) else float(largest)],
            "biases": [one.bias is not None for one in (conv, module.in_proj, module.out_proj)], "norm": norm}


def _attention(module: Any, c: Any, model: Any) -> dict[str, Any]:
    heads, out = c.num_attention_heads, linear(module, "o_proj", "out_proj")
    latent = c.model_type in _LATENT
    width = module.qk_head_dim if latent else module.head_dim
    found = {"heads": heads, "head_dim": width, "bias": out.bias is not None, "window": 0,
             "scores": float(module.scaling)}
    if latent:
        assert c.num_key_value_heads == heads
        found |= {"turning": module.qk_rope_head_dim, "value": module.v_head_dim,
                  "latents": [module.q_lora_rank or 0, module.kv_lora_rank]}
        turning = turns(rotary(model, c)) if c.model_type == "bailing_hybrid" else None
        assert turning is None or len(turning) == module.qk_rope_head_dim // 2 + 1
        return found | {"turns": turning}
    kv = module.k_proj.out_features // width
    assert heads % kv == 0 and out.in_features == heads * width and kv == c.num_key_value_heads
    assert (module.q_proj.bias is None) == (out.bias is None)
    body = model.model if hasattr(model, "model") else model.backbone
    turning = any(getattr(body, name, None) is not None for name in ROTARY)
    assert not turning or width % 2 == 0
    return found | {"kv": kv, "turns": turns(rotary(model, c)) if turning else None}


def _experts(module: Any, c: Any, layer: Any) -> list[Any]:
    kind = c.model_type
    count, chosen = getattr(c, "num_experts", None) or c.num_local_experts, c.num_experts_per_tok
    groups = [getattr(c, "n_group", 1), getattr(c, "topk_group", 1)]
    assert chosen and chosen <= count // groups[0] * groups[1] and count % groups[0] == 0 and groups[1] <= groups[0]
    shared = getattr(module, "shared_experts", None) or getattr(module, "shared_expert", None)
    width = 0 if shared is None else shared.down_proj.in_features
    if kind == "granitemoehybrid":
        width = c.shared_intermediate_size
    of_one = c.intermediate_size if kind == "granitemoehybrid" else c.moe_intermediate_size
    sigmoid = kind in (*_LATENT, "nemotron_h", "lfm2_moe")
    biased = c.use_expert_bias if kind == "lfm2_moe" else sigmoid
    gated = hasattr(module, "shared_expert_gate")
    return [count, chosen, of_one, width, getattr(c, "moe_latent_size", None) or 0, gated,
            groups if groups[0] > 1 else None, "sigmoid" if sigmoid else "softmax", getattr(c, "norm_topk_prob", True),
            float(getattr(c, "routed_scaling_factor", 1.0)), biased]


def _own(model: Any, c: Any, layer: Any) -> dict[str, Any]:
    if c.model_type == "granitemoehybrid":
        assert c.logits_scaling and c.embedding_multiplier and c.residual_multiplier
        return {"embedding_multiplier": model.model.embedding_multiplier, "logits_scaling": c.logits_scaling,
                "residual_multiplier": layer.residual_multiplier}
    if c.model_type != "falcon_h1":
        return {}
    gate, down = layer.feed_forward.gate_multiplier, layer.feed_forward.down_multiplier
    own = {"embedding": model.model.embedding_multiplier, "logit": model.model.lm_head_multiplier,
           "key": layer.self_attn.key_multiplier, "attention_in": layer.attention_in_multiplier,
           "attention_out": layer.attn_out_multiplier, "state_in": layer.mamba.ssm_in_multiplier,
           "state_out": layer.ssm_out_multiplier, "gate": gate, "down": down}
    own |= {f"state_{name}": factor for name, factor in zip(("gate", "x", "b", "c", "dt"), c.ssm_multipliers,
                                                            strict=True)}
    assert all(type(factor) in (int, float) for factor in own.values())
    return {f"{name}_multiplier": factor for name, factor in own.items()}
