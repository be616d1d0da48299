"""The config.json files of types with Mamba-2 or short convolutions: keys to draw, and what jaxtrain takes them for."""

from typing import Any

import numpy as np

_MAMBA = {"mamba_n_heads": [4, 8], "mamba_d_head": ["auto", 8], "mamba_n_groups": [1, 2], "mamba_d_state": [6],
          "mamba_d_conv": [3, 4], "mamba_expand": [2, 1], "mamba_conv_bias": [True, False],
          "mamba_proj_bias": [True, False], "time_step_limit": "limits", "hidden_act": ["silu"]}
_BIASES = {"attention_bias": [True, False], "mlp_bias": [True, False]}
_FACTORS = {key: [0.5, 2.0] for key in (
    "embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier",
    "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier")}
_CONVOLUTION = {"conv_L_cache": [3, 4], "conv_bias": [True, False], "tie_embedding": [True, False],
                "layer_types": "convolutions", "norm_eps": [1e-5, 1e-6]}
DRAWS: dict[str, dict[str, Any]] = {  # beside the sizes and rotary positions that most decoders have
    "mamba2": {"hidden_size": [16], "num_heads": [4], "head_dim": [8], "state_size": [6],
               "n_groups": [1, 2], "expand": [2],
               "conv_kernel": [3, 4], "use_bias": [True, False], "use_conv_bias": [True, False],
               "layer_norm_epsilon": [1e-5, 1e-3], "time_step_limit": "limits", "hidden_act": ["silu"]},
    "nemotron_h": {
        "hybrid_override_pattern": ["M-*-", "ME*E", "MM*", "M*X"], "layers_block_type": "layer mixers",
        "head_dim": [6],
        "num_key_value_heads": [1, 2], "mamba_num_heads": [4], "mamba_head_dim": [6, 8],
        "ssm_state_size": [5], "n_groups": [1, 2], "mamba_n_groups": [4], "conv_kernel": [3], "mamba_d_conv": [2],
        "use_bias": [True, False], "mlp_bias": [True, False], "use_conv_bias": [True, False],
        "time_step_min": [0.001, 0.1], "mamba_dt_min": [0.2], "n_routed_experts": [8], "num_experts_per_tok": [2],
        "moe_intermediate_size": [6], "moe_shared_expert_intermediate_size": [10], "moe_latent_size": [12, None],
        "n_group": [1, 2, 4], "topk_group": [1, 2], "routed_scaling_factor": [1.0, 2.5],
        "norm_topk_prob": [True, False], "tie_word_embeddings": [False], "layer_norm_epsilon": [1e-5, 1e-3]},
    "granitemoehybrid": _MAMBA | {
        "layer_types": "mixers", "num_local_experts": [0, 4], "num_experts_per_tok": [2],
        "shared_intermediate_size": [12], "position_embedding_type": ["rope", "nope", None],
        "embedding_multiplier": [6.0], "attention_multiplier": [0.3], "residual_multiplier": [0.22],
        "logits_scaling": [4.0], "attention_bias": [True, False]},
    "bamba": _MAMBA | _BIASES | {"attn_layer_indices": [None, [], [0], [1, 2], [1, 99]], "head_dim": [8]},
    "falcon_h1": _MAMBA | _BIASES | _FACTORS | {
        "mamba_d_ssm": [24, 32, None], "mamba_rms_norm": [True, False], "mamba_norm_before_gate": [True, False],
        "projectors_bias": [True, False], "mlp_multipliers": [[0.5, 2.0], None],
        "ssm_multipliers": [[0.5, 2.0, 3.0, 0.25, 1.0], None]},
    "lfm2": _CONVOLUTION | {
        "full_attn_idxs": [None, [0], [1, 2]], "block_ff_dim": [24], "num_key_value_heads": [1, 2],
        "block_multiple_of": [8, 5], "block_ffn_dim_multiplier": [1.0, 1.5],
        "block_auto_adjust_ff_dim": [True, False]},
    "lfm2_moe": _CONVOLUTION | {
        "num_hidden_layers": [3], "num_key_value_heads": [1, 2], "layer_types": [
            ["conv", "conv", "full_attention"], ["conv", "full_attention", "conv"], ["full_attention"] * 3],
        "num_experts": [4], "num_experts_per_tok": [2], "moe_intermediate_size": [6], "num_dense_layers": [0, 1],
        "use_expert_bias": [True, False], "routed_scaling_factor": [1.0, 1.5], "norm_topk_prob": [True, False]},
}
KINDS = tuple(DRAWS)
_MIXERS = {"convolutions": ["conv", "full_attention"],
           "mixers": ["mamba", "attention", "full_attention", "linear_attention"],
           "layer mixers": ["mamba", "attention", "mlp", "moe"]}
KINDS_OF_VALUES = ("limits", *_MIXERS)
_LETTERS = {"M": "linear_attention", "A": "full_attention", "F": "mlp", "E": "moe", "C": "conv"}


def drawn(values: str, layers: int, rng: np.random.Generator) -> Any:
    """Return a value of one of `KINDS_OF_VALUES`, for a file with so many layers; seldom it has one more."""
    if values == "limits":
        return [[0.0, float("inf")], [0.01, 0.5], [0.1, float("inf")], [-1.0, 2.0]][rng.integers(4)]
    return [*map(str, rng.choice(_MIXERS[values], layers + int(rng.random() < 0.1)))]


def shape(c: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the shape of a model that jaxtrain takes from a file."""
    from jaxtrain.models.attention.rotary import scaled_frequencies

    kinds = getattr(c, "layer_kinds", "") or "M" * c.num_layers
    found: dict[str, Any] = {"vocab_size": c.vocab_size, "width": c.embed_dim, "tied": c.tied_embeddings,
                             "eps": c.norm_eps, "kinds": [_LETTERS[kind] for kind in kinds]}
    attends = "A" in kinds or c.name == "falcon_h1"
    if attends:
        found |= {"heads": [c.num_heads, c.num_kv_heads, c.head_dim], "length": c.max_seq_len}
    if attends and getattr(c, "rotary_width", 0):
        turns, scale = scaled_frequencies(c, c.rotary_width)
        found["turns"] = [*map(float, turns), float(scale)]
    if "M" in kinds:
        found["states"] = [c.state_heads, c.state_head_dim, c.state_groups, c.state_dim, c.conv_width, c.conv_bias,
                           c.state_bias, c.least_step, c.largest_step]
    if "C" in kinds:
        found["convolutions"] = [c.conv_width, c.conv_bias]
    e = c.experts
    if e.num:
        found["experts"] = [e.num, e.per_token, e.mlp_dim, e.shared_width, e.latent_dim, e.groups, e.groups_used,
                            e.scale, e.normalized, e.dense_layers, e.bias_rate > 0]
    return found | {"own": _own(c, kinds)}


def _own(c: Any, kinds: str) -> dict[str, Any]:
    if c.name == "nemotron_h":
        return {"mlp": c.mlp_dim if "F" in kinds else None, "mlp_bias": c.mlp_bias}
    if c.name == "granitemoehybrid":
        return {"mlp": c.shared_mlp_dim, "attention_bias": c.attention_bias, "factors": [
            c.embedding_multiplier, c.attention_multiplier, c.residual_multiplier, c.logits_scaling]}
    own: dict[str, Any] = {} if c.name == "mamba2" else {"mlp": c.mlp_dim}
    if c.name in ("bamba", "falcon_h1"):
        own["biases"] = [c.attention_bias, c.mlp_bias]
    if c.name == "falcon_h1":
        own |= {"out_bias": c.state_out_bias, "norm": c.state_norm, "factors": [
            c.embedding_multiplier, c.logit_multiplier, c.key_multiplier, c.attention_in_multiplier,
            c.attention_out_multiplier, c.state_in_multiplier, c.state_out_multiplier], "lists": [
            [c.gate_multiplier, c.down_multiplier],
            [c.state_gate_multiplier, c.state_x_multiplier, c.state_b_multiplier, c.state_c_multiplier,
             c.state_dt_multiplier]]}
    return own
