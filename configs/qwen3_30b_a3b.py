"""Qwen3 30B-A3B, trained from random values: the published shape (3.3 billion parameters at work on each token), in
rows of 4,096 tokens.

    python -m jaxtrain.main --config=configs/qwen3_30b_a3b.py --config.data.source=/path/to/text

For 32 accelerators of 80 GB in groups of 8 with fast links: the 128 experts of a layer on the 8 devices of a group, all
fully sharded across the groups (15 GB of state a device, gradients included). No token is dropped. Speed and loss: not
measured. Text given as it is becomes bytes; `jaxtrain.data.prepare` makes a corpus with the published tokenizer.json.
Variant: `:tiny` (seconds on a CPU).
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"qwen3_30b_a3b.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "qwen3_moe", "vocab_size": 151936, "num_layers": 48, "embed_dim": 2048, "num_heads": 32,
                  "num_kv_heads": 4, "head_dim": 128, "num_experts": 128, "experts_per_token": 8,
                  "expert_mlp_dim": 768, "balance_loss": 0.001 * 8 / 48, "max_seq_len": 4096, "norm_eps": 1e-6,
                  "rope_theta": 1_000_000.0, "tied_embeddings": False},
        "mesh": {"data": 1, "fsdp": -1, "expert": 8},
        "data": {"seq_len": 4096, "global_batch_size": 512},  # two million tokens
        "optimizer": {"learning_rate": 4e-4, "warmup_steps": 2000, "final_fraction": 0.1},
        "train": {"steps": 100_000, "accumulation": 8, "remat": "full", "eval_every": 1000},
    })
    if variant == "tiny":
        config.update({
            "model": {"vocab_size": 320, "num_layers": 2, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 2,
                      "head_dim": 32, "num_experts": 8, "experts_per_token": 2, "expert_mlp_dim": 48,
                      "max_seq_len": 64},
            "mesh": {"expert": 1},
            "data": {"seq_len": 64, "global_batch_size": 16},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
            "train": {"steps": 20, "accumulation": 1, "eval_every": 10},
            "checkpoint": {"every": 10},
        })
    return config
