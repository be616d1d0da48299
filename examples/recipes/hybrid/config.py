"""A tiny hybrid: three layers of gated DeltaNet to one of attention, as in Qwen3-Next and Qwen3.5.

    python -m jaxtrain.main --config=examples/recipes/hybrid/config.py

Four layers of width 64. Variant: `:tiny` (two of the layers, two steps).
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"config.py has no variant {variant!r}: known is tiny")
    steps = 2 if variant == "tiny" else 300
    config = ConfigDict({
        "model": {"name": "qwen3_5", "vocab_size": 320, "num_layers": 4, "embed_dim": 64, "num_heads": 4,
                  "num_kv_heads": 2, "head_dim": 32, "mlp_dim": 192, "layer_pattern": "DDDA", "state_heads": 4,
                  "state_key_heads": 2, "state_key_dim": 16, "state_value_dim": 16, "max_seq_len": 128},
        "data": {"source": "stdlib", "seq_len": 128, "global_batch_size": 8},
        "optimizer": {"learning_rate": 4e-3, "warmup_steps": 0.05},
        "train": {"steps": steps, "eval_every": steps // 2, "eval_batches": 32},
        "checkpoint": {"every": 0},
    })
    if variant == "tiny":
        config.model.update({"num_layers": 2, "layer_pattern": "DA"})
    return config
