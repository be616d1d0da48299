"""GLM-4.5-Air (107B, 12B at work on each token), trained from random values: the published shape, in rows of 4,096.

    python -m jaxtrain.main --config=configs/glm4_5_air.py --config.data.source=/path/to/text

For 64 accelerators of 80 GB or more in groups of 8 with fast links: the 128 experts of a layer on the 8 devices of a
group, all fully sharded across the groups. Predicted for 64 H100: docs/performance.md. The router's bias evens out the
load of experts, and no token is dropped. --config.model.mtp_loss_weight=0.3 also learns the token after the next.
Speed and loss: not measured. Text given as it is becomes bytes; `jaxtrain.data.prepare` makes a corpus with the
published tokenizer.json. Variant: `:tiny` (seconds on a CPU).
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"glm4_5_air.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "glm4_moe", "vocab_size": 151552, "num_layers": 46, "embed_dim": 4096, "num_heads": 96,
                  "num_kv_heads": 8, "head_dim": 128, "mlp_dim": 10944, "dense_layers": 1, "num_experts": 128,
                  "experts_per_token": 8, "expert_mlp_dim": 1408, "shared_experts": 1, "router": "sigmoid",
                  "router_bias_rate": 0.001, "balance_loss": 0.0001, "attention_bias": True, "max_seq_len": 131072,
                  "norm_eps": 1e-5, "rope_theta": 1_000_000.0, "tied_embeddings": False},
        "mesh": {"data": 1, "fsdp": -1, "expert": 8},
        "data": {"seq_len": 4096, "global_batch_size": 1024},  # four million tokens
        "optimizer": {"learning_rate": 2.5e-4, "warmup_steps": 2000, "final_fraction": 0.1},
        "train": {"steps": 100_000, "accumulation": 16, "remat": "full", "eval_every": 1000},
    })
    if variant == "tiny":
        config.update({
            "model": {"vocab_size": 320, "num_layers": 3, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 2,
                      "head_dim": 32, "mlp_dim": 192, "num_experts": 8, "experts_per_token": 2, "expert_mlp_dim": 48,
                      "max_seq_len": 64},
            "mesh": {"expert": 1},
            "data": {"seq_len": 64, "global_batch_size": 16},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
            "train": {"steps": 20, "accumulation": 1, "eval_every": 10},
            "checkpoint": {"every": 10},
        })
    return config
