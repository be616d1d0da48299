"""Decoders with Mamba-2 or short convolutions in some or all layers."""

from typing import Any

from tests.hub.cases.sizes import SIZES

_MAMBA2 = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8,
           "state_size": 6, "n_groups": 2, "pad_token_id": 0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name: (model type, what transformers is given)
    "mamba2": ("mamba2", _MAMBA2 | {"use_bias": True, "time_step_limit": [0.02, 1.0]}),
    "mamba2_plain": ("mamba2", _MAMBA2 | {"n_groups": 1, "use_conv_bias": False, "tie_word_embeddings": True,
                                           "conv_kernel": 3}),
}
