"""Mixtral 8x7B, trained from random values: the published shape, in rows of 8,192 tokens.

    python -m jaxtrain.main --config=configs/mixtral_8x7b.py --config.data.source=/path/to/text

For 64 accelerators of 80 GB in groups of 8 with fast links: the 8 experts of a layer on the 8 devices of a group, all
fully sharded across the groups (12 GB of state a device, gradients included). No token is dropped. Speed and loss: not
measured. Text given as it is becomes bytes; `jaxtrain.data.prepare` makes a corpus with the published tokenizer.json.
Variant: `:tiny` (seconds on a CPU).
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"mixtral_8x7b.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "mixtral", "vocab_size": 32000, "num_layers": 32, "embed_dim": 4096, "num_heads": 32,
                  "num_kv_heads": 8, "num_experts": 8, "experts_per_token": 2, "expert_mlp_dim": 14336,
                  "balance_loss": 0.02 * 2 / 32, "max_seq_len": 8192, "norm_eps": 1e-5, "rope_theta": 1_000_000.0,
                  "tied_embeddings": False},
        "mesh": {"data": 1, "fsdp": -1, "expert": 8},
        "data": {"seq_len": 8192, "global_batch_size": 256},  # two million tokens
        "optimizer": {"learning_rate": 3e-4, "warmup_steps": 2000, "final_fraction": 0.1},
        "train": {"steps": 100_000, "accumulation": 4, "remat": "full", "eval_every": 1000},
    })
    if variant == "tiny":
        config.update({
            "model": {"vocab_size": 320, "num_layers": 2, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 2,
                      "expert_mlp_dim": 96, "max_seq_len": 64},
            "mesh": {"expert": 1},
            "data": {"seq_len": 64, "global_batch_size": 16},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
            "train": {"steps": 20, "accumulation": 1, "eval_every": 10},
            "checkpoint": {"every": 10},
        })
    return config
