"""Draws config.json files of the dense types, and what jaxtrain takes them for; see `tests.config.families`."""

from typing import Any

import numpy as np

_BIASES = {"attention_bias": [True, False], "mlp_bias": [True, False]}
_WINDOWS = {"sliding_window": [3, 5, None], "layer_types": "layers"}
_NO_KV = {"num_key_value_heads": [1, 2]}  # of types that take no null


def _long_rope(given: dict[str, Any], rng: np.random.Generator) -> Any:
    """Return parameters of LongRoPE, a factor for each pair that turns, or none."""
    part = [1.0, 0.5][rng.integers(2)]
    pairs = int(given.get("hidden_size", 3072) // given.get("num_attention_heads", 32) * part) // 2
    found = {"rope_type" if rng.random() < 0.5 else "type": ["longrope", "su", "yarn"][rng.integers(3)],
             "short_factor": [1.0 + n / 4 for n in range(pairs)], "long_factor": [2.0 + n for n in range(pairs)]}
    found |= {"partial_rotary_factor": part} if part != 1 or rng.random() < 0.3 else {}
    for key, value in (("rope_theta", 30.0), ("factor", 4.0), ("factor", 1.0), ("attention_factor", 1.25),
                       ("short_mscale", 1.1), ("original_max_position_embeddings", 8)):
        found |= {key: value} if rng.random() < 0.25 else {}
    return [None, {"type": "default"}, found, found, found][rng.integers(5)]


def _width(given: dict[str, Any], rng: np.random.Generator) -> Any:
    """Return the width of heads that follows from the others, or another one."""
    follows = given.get("hidden_size", 32) // given.get("num_attention_heads", 4)
    return [follows, follows, follows, 6][rng.integers(4)]


# The keys that the types have beside those of shape and rotary positions, with values to draw from.
DRAWS: dict[str, dict[str, Any]] = {
    "arcee": _BIASES | {"head_dim": [6, None], "hidden_act": ["relu2", "relu2", "relu2", "silu"]},
    "smollm3": _BIASES | _WINDOWS | {
        "use_sliding_window": [False, False, True], "no_rope_layer_interval": [1, 2, 4, 0], "head_dim": [6],
        "no_rope_layers": [None, [1, 0, 1, 0, 1, 0, 1], [1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0], [1, 1, 0, 1, 1, 0, 1]]},
    "granite": _BIASES | {"embedding_multiplier": [6.0, 12], "attention_multiplier": [0.3], "logits_scaling": [4.0, 8],
                          "residual_multiplier": [0.22], "head_dim": [6]},
    "seed_oss": _BIASES | {"head_dim": [6, None], "attention_out_bias": [True, False]},
    "ernie4_5": {"head_dim": [6, None], "use_bias": [True, False, None]},
    "phi3": {"rope_scaling": _long_rope, "rope_parameters": _long_rope, "sliding_window": [3, 5, None],
             "head_dim": _width, "partial_rotary_factor": [0.5, 1.0, None],
             "original_max_position_embeddings": [8, 16, 64]},
    "glm4": _NO_KV | {"head_dim": [6, 8], "attention_bias": [True, False],
                      "partial_rotary_factor": [0.5, 1.0, 0.25, None]},
    "olmo2": {"head_dim": [6], "attention_bias": [False, False, True]},
    "olmo3": _WINDOWS | {"head_dim": [6], "attention_bias": [False, False, False, True], "rope_parameters": "nested",
                         "rope_scaling": [None, {"rope_type": "linear", "factor": 8.0},
                                          {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}]},
    "exaone4": _NO_KV | _WINDOWS | {"head_dim": [6], "sliding_window_pattern": [1, 2, 3, None, "LLLG", "LG"]},
    "gemma2": _NO_KV | _WINDOWS | {
        "head_dim": [6], "query_pre_attn_scalar": [9], "attention_bias": [False, False, True],
        "final_logit_softcapping": [20.0, None, 30.0], "attn_logit_softcapping": [40.0, None],
        "use_bidirectional_attention": [None, False, None, True], "hidden_activation": ["gelu_pytorch_tanh"],
        "hidden_act": ["gelu_pytorch_tanh"]},
    "cohere": {"head_dim": [6], "logit_scale": [0.5, 1.0, None], "layer_norm_eps": [1e-4], "use_qk_norm": [True, False],
               "attention_bias": [True, False]},
    "cohere2": _WINDOWS | {"head_dim": [6, 8], "logit_scale": [0.5], "layer_norm_eps": [1e-4],
                           "attention_bias": [True, False], "sliding_window_pattern": [1, 2, 3]},
    "ministral3": _WINDOWS | {"head_dim": [6, None], "rope_scaling": [None], "rope_parameters": [
        None, {"rope_type": "default"}, {"rope_type": "default", "original_max_position_embeddings": 8,
                                         "llama_4_scaling_beta": 0.2},
        {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3},
        {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0,
         "rope_theta": 30.0, "mscale": 1.0, "mscale_all_dim": 0.5}]},
    "ministral": _WINDOWS | {"head_dim": [6, 8]},
    "hunyuan_v1_dense": {
        "head_dim": [6], "attention_bias": [True, False], "rope_scaling": [
            None, {"type": "dynamic", "alpha": 50.0, "factor": 1.0}, {"rope_type": "dynamic", "alpha": 1, "factor": 2},
            {"type": "dynamic", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0, "alpha": 9.0}]},
    "apertus": {"head_dim": [6], "attention_bias": [True, False], "hidden_act": ["xielu", "xielu", "xielu", "silu"]},
    "nanochat": {"head_dim": [6], "attention_bias": [True, False], "final_logit_softcapping": [20.0, None, 15.0],
                 "hidden_act": ["relu2", "relu2", "relu2", "silu"]},
    "olmo": {"head_dim": [6], "attention_bias": [True, False], "clip_qkv": [0.5, None]},
    "glm": _NO_KV | {"head_dim": [6, 8], "attention_bias": [True, False],
                     "partial_rotary_factor": [0.5, 1.0, 0.25, None]},
    "gemma": _NO_KV | {"head_dim": [6, 8], "attention_bias": [True, False],
                       "hidden_act": ["gelu", "gelu_pytorch_tanh", "gelu_pytorch_tanh", "silu"],
                       "use_bidirectional_attention": [None, False, None, True]},
    "starcoder2": _NO_KV | {"head_dim": [6, None], "norm_epsilon": [1e-4], "sliding_window": [3, None],
                            "use_bias": [True, False], "mlp_type": ["default"], "layer_types": "layers"},
    "stablelm": _NO_KV | {"head_dim": _width, "layer_norm_eps": [1e-4], "use_qkv_bias": [True, False],
                          "qk_layernorm": [True, False], "use_parallel_residual": [True, False],
                          "partial_rotary_factor": [0.5, 1.0, 0.25, None]},
    "helium": _NO_KV | _BIASES | {"head_dim": _width},
    "nemotron": _NO_KV | _BIASES | {"head_dim": [6, 8, None], "norm_eps": [1e-4],
                           "partial_rotary_factor": [0.5, 1.0, 0.25, None]},
    "youtu": _BIASES | {
        "num_key_value_heads": [2, 4], "num_attention_heads": [2, 4], "q_lora_rank": [12, None], "kv_lora_rank": [12],
        "qk_nope_head_dim": [6], "qk_rope_head_dim": [4], "v_head_dim": [8], "head_dim": [4],
        "attention_bias": [False, False, False, True], "rope_interleave": [True, True, True, False],
        "first_k_dense_replace": [1], "n_routed_experts": [8]},
}
KINDS = tuple(DRAWS)
_ACTIVATIONS = {"gemma": "gelu_pytorch_tanh", "gemma2": "gelu_pytorch_tanh", "starcoder2": "gelu_pytorch_tanh",
                "arcee": "relu2", "nemotron": "relu2", "nanochat": "relu2", "apertus": "xielu"}
_OWN = {"granite": ("embedding_multiplier", "residual_multiplier", "logits_scaling"), "gemma2": ("logit_cap",),
        "nanochat": ("logit_cap",), "cohere": ("logit_scale", "qk_norm"), "cohere2": ("logit_scale",),
        "olmo": ("clip_qkv",), "stablelm": ("qk_norm", "parallel"), "ministral3": ("query_beta", "query_len"),
        "phi3": ("rope_long_factor",)}


def shape(c: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the shape of a model, as `dense_families_truth.shape` does."""
    if c.latent_attention:
        return _latent(c)
    scores = {"granite": getattr(c, "attention_multiplier", 0), "gemma2": getattr(c, "query_scale", 0) ** -0.5
              if c.name == "gemma2" else 0}.get(c.name, c.head_dim ** -0.5)
    everywhere = _everywhere(c)
    found = {"vocab_size": c.vocab_size, "layers": c.num_layers, "width": c.embed_dim, "heads": c.num_heads,
             "kv": c.num_kv_heads, "length": c.max_seq_len, "tied": c.tied_embeddings, "eps": c.norm_eps,
             "head_dim": c.head_dim, "mlp": c.mlp_dim, "biases": _biases(c), "scores": scores,
             "cap": c.attention_cap, "activation": _ACTIVATIONS.get(c.name, "silu"), "turns": _turns(c, everywhere),
             "windows": [0 if full else c.window for full in everywhere],
             "turning": [_turning(c, n, full) for n, full in enumerate(everywhere)]}
    return found | {"own": {key: getattr(c, key) for key in _OWN.get(c.name, ())}}


def _latent(c: Any) -> dict[str, Any]:
    from jaxtrain.models.attention.rotary import score_factor

    return {"vocab_size": c.vocab_size, "layers": c.num_layers, "width": c.embed_dim, "heads": c.num_heads,
            "length": c.max_seq_len, "tied": c.tied_embeddings, "eps": c.norm_eps, "mlp": c.mlp_dim,
            "parts": [c.head_dim, c.rope_head_dim, c.value_head_dim], "latents": [c.q_rank, c.kv_rank],
            "scores": score_factor(c) * (c.head_dim + c.rope_head_dim) ** -0.5, "turns": _turns(c, [])}


def _everywhere(c: Any) -> list[bool]:
    """Return which layers have no window where others may have one."""
    if c.name == "ministral":
        return [kind == "G" for kind in c.kinds]
    every = getattr(c, "global_every", 0) if c.window else 0
    return [every > 0 and (n + 1) % every == 0 for n in range(c.num_layers)]


def _turning(c: Any, layer: int, everywhere: bool) -> bool:
    """Return whether a layer has rotary positions."""
    if c.name == "smollm3":
        return not c.no_rope_every or (layer + 1) % c.no_rope_every != 0
    return not (everywhere and c.name in ("exaone4", "cohere2"))


def _biases(c: Any) -> list[bool]:
    """Return whether queries, what attention returns, and the MLP have biases."""
    every = getattr(c, "use_bias", False)
    qkv = getattr(c, "attention_bias", False) or getattr(c, "qkv_bias", False) or every
    out = getattr(c, "attention_out_bias", qkv and c.name not in ("glm", "glm4", "helium", "stablelm"))
    return [qkv, out, getattr(c, "mlp_bias", every)]


def _turns(c: Any, everywhere: list[bool]) -> Any:
    from jaxtrain.models.attention.rotary import frequencies, scaled_frequencies

    turns, scale = scaled_frequencies(c, c.rotary_width)
    far = [*map(float, turns), float(scale)]
    if c.name != "olmo3":
        return far
    both = {True: far, False: [*map(float, frequencies(c.head_dim, c.local_rope_theta)), 1.0]}
    return {"full" if full else "sliding": both[full] for full in {*everywhere}}
