"""gpt-oss 20B, trained from random values: the published shape (3.6 billion parameters at work on each token), in rows
of 4,096 tokens.

    python -m jaxtrain.main --config=configs/gpt_oss_20b.py --config.data.source=/path/to/text

For 32 accelerators of 80 GB in groups of 8 with fast links: the 32 experts of a layer on the 8 devices of a group, all
fully sharded across the groups (10 GB of state a device, gradients included). No token is dropped. Of two layers one
sees 128 tokens, the other all. `--config=hf:FOLDER` begins with the published weights. Speed and loss: not measured.
Text given as it is becomes bytes; `jaxtrain.data.prepare` makes a corpus with the published tokenizer.json. Variants:
`:120b` (36 layers of 128 experts), `:tiny` (seconds on a CPU).
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "120b", "tiny"):
        raise ValueError(f"gpt_oss_20b.py has no variant {variant!r}: known are 120b and tiny")
    config = ConfigDict({
        "model": {"name": "gpt_oss", "vocab_size": 201088, "num_layers": 24, "embed_dim": 2880, "num_heads": 64,
                  "num_kv_heads": 8, "head_dim": 64, "num_experts": 32, "experts_per_token": 4, "expert_mlp_dim": 2880,
                  "balance_loss": 0.001 * 4 / 24, "max_seq_len": 131072, "window": 128, "global_every": 2,
                  "rope_theta": 150_000.0, "rope_type": "yarn", "rope_scaling": 32.0, "rope_original_len": 4096,
                  "rope_truncate": False},
        "mesh": {"data": 1, "fsdp": -1, "expert": 8},
        "data": {"seq_len": 4096, "global_batch_size": 512},  # two million tokens
        "optimizer": {"learning_rate": 4e-4, "warmup_steps": 2000, "final_fraction": 0.1},
        "train": {"steps": 100_000, "accumulation": 8, "remat": "full", "eval_every": 1000},
    })
    if variant == "120b":
        config.model.update({"num_layers": 36, "num_experts": 128, "balance_loss": 0.001 * 4 / 36})
    if variant == "tiny":
        config.update({
            "model": {"vocab_size": 320, "num_layers": 2, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 2,
                      "head_dim": 32, "num_experts": 8, "experts_per_token": 2, "expert_mlp_dim": 48,
                      "max_seq_len": 64, "window": 16, "rope_original_len": 16, "rope_scaling": 4.0},
            "mesh": {"expert": 1},
            "data": {"seq_len": 64, "global_batch_size": 16},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
            "train": {"steps": 20, "accumulation": 1, "eval_every": 10},
            "checkpoint": {"every": 10},
        })
    return config
