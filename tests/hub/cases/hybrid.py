"""Decoders with states in place of attention in some or all layers."""

from typing import Any

from tests.hub.cases.sizes import SIZES

_DELTA = SIZES | {
    "num_hidden_layers": 4, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name: (model type, what transformers is given)
    "qwen3_5": ("qwen3_5_text", _DELTA | {
        "layer_types": ["linear_attention", "full_attention"] * 2, "partial_rotary_factor": 0.5}),
}
