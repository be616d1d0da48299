"""A tiny mixture of experts, and the dense model that computes as much for a token.

    python -m jaxtrain.main --config=examples/recipes/experts/config.py
    python -m jaxtrain.main --config=examples/recipes/experts/config.py:dense

Two layers of width 96. Each has eight experts of width 96, of which a token goes to two; `:dense` has one of width 192.
Variant: `:tiny` (the same with two steps).
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "dense", "tiny"):
        raise ValueError(f"config.py has no variant {variant!r}: known are dense and tiny")
    width = {"name": "llama", "mlp_dim": 192} if variant == "dense" else {
        "name": "mixtral", "num_experts": 8, "experts_per_token": 2, "expert_mlp_dim": 96, "balance_loss": 0.01}
    steps = 2 if variant == "tiny" else 400
    return ConfigDict({
        "model": {"vocab_size": 320, "num_layers": 2, "embed_dim": 96, "num_heads": 4, "num_kv_heads": 2,
                  "max_seq_len": 128, **width},
        "data": {"source": "stdlib", "seq_len": 128, "global_batch_size": 8},
        "optimizer": {"learning_rate": 4e-3, "warmup_steps": 0.05},
        "train": {"steps": steps, "eval_every": steps // 2, "eval_batches": 32},
        "checkpoint": {"every": 0},
    })
