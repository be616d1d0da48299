"""Draws config.json files of Gemma 4, and what jaxtrain takes them for; see `tests.config.families`."""

from typing import Any

import numpy as np


def _layers(given: dict[str, Any], rng: np.random.Generator) -> Any:
    """Return a kind for each layer, or none."""
    count = given.get("num_hidden_layers", 3) + int(rng.random() < 0.1)
    near, far = "sliding_attention", "full_attention"
    return [None, None, ([near, far] * count)[:count], ([near, near, far] * count)[:count], [far] * count,
            [near] * count, [far, near] * (count // 2) + [far] * (count % 2)][rng.integers(7)]


def _positions(given: dict[str, Any], rng: np.random.Generator) -> Any:
    """Return the positions of both kinds of layers, or of some, or none."""
    near = [{"rope_theta": 70.0}, {"rope_theta": 70.0}, {"rope_type": "default", "rope_theta": 50},
            {"rope_type": "default"}][rng.integers(4)]
    far = [{"rope_type": "proportional", "rope_theta": 30.0, "partial_rotary_factor": 0.5},
           {"rope_type": "proportional", "rope_theta": 30.0}, {"rope_type": "default", "rope_theta": 30.0},
           {"rope_type": "proportional", "rope_theta": 30.0, "partial_rotary_factor": 0.25, "factor": 4.0},
           {"rope_type": "linear", "rope_theta": 30.0, "factor": 4.0},
           {"rope_theta": 20.0}][rng.integers(6)]
    both = {"sliding_attention": near, "full_attention": far}
    return [None, *[both] * 6, {"full_attention": far}][rng.integers(8)]


def _of_each(given: dict[str, Any], rng: np.random.Generator) -> Any:
    """Return sizes of some layers."""
    count = given.get("num_hidden_layers", 3)
    return [{f"{count - 1}": {"head_dim": 4}}, {}, None,
            {f"{n}": {"head_dim": 8, "num_key_value_heads": 1} for n in range(count)},
            {f"{n}": {"head_dim": 4} for n in range(count) if n % 2 or n == count - 1}][rng.integers(5)]


DRAWS: dict[str, dict[str, Any]] = {"gemma4_text": {
    "head_dim": [6], "num_key_value_heads": [1, 2], "layer_types": _layers, "rope_parameters": _positions,
    "rope_scaling": [],  # none: null already means that there are no positions
    "sliding_window": [3, 5], "global_head_dim": [8, 4], "num_global_key_value_heads": [
        1, 2, None], "attention_k_eq_v": [True, False], "attention_bias": [False, False, True],
    "per_layer_config": _of_each, "final_logit_softcapping": [20.0, None],
    "hidden_size_per_layer_input": [0, 4], "vocab_size_per_layer_input": [40, 40, 24],
    "num_kv_shared_layers": [0, 0, 0, 0, 1, 2], "use_double_wide_mlp": [True, False], "enable_moe_block": [True, False],
    "num_experts": [4, 8], "top_k_experts": [2, 3], "moe_intermediate_size": [6],
    "use_bidirectional_attention": [None, None, "vision", None, "vision", "all"],
    "hidden_activation": ["gelu_pytorch_tanh"]}}
KINDS = tuple(DRAWS)
SIZES = {"global_head_dim", "vocab_size_per_layer_input"}  # what decides how large a model is


def shape(c: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the shape of a model, as `gemma4_family_truth.shape` does."""
    from jaxtrain.models.gemma4 import rotaries

    turns = {kind: [*rotary.frequency] for kind, rotary in rotaries(c).items() if kind in c.layer_kinds.upper()}
    e = c.experts
    return {"vocab_size": c.vocab_size, "width": c.embed_dim, "heads": c.num_heads, "length": c.max_seq_len,
            "tied": c.tied_embeddings, "eps": c.norm_eps, "layers": [_layer(c, kind) for kind in c.layer_kinds],
            "experts": [e.num, e.per_token, e.mlp_dim] if e.num else None, "cap": c.logit_cap, "turns": turns,
            "inputs": [c.per_layer_dim, c.per_layer_vocab] if c.per_layer_dim else None}


def _layer(c: Any, kind: str) -> list[Any]:
    everywhere, reads = kind.upper() == "G", kind.islower()
    kv = c.global_kv_heads if everywhere else c.num_kv_heads
    return [0 if everywhere else c.window, c.global_head_dim if everywhere else c.head_dim, None if reads else kv,
            not reads and not (everywhere and c.keys_are_values), c.attention_bias,
            c.mlp_dim * (2 if reads and c.double_wide_mlp else 1)]
