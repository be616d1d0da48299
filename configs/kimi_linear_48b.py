"""Kimi Linear 48B-A3B, trained from random values: the published shape, in rows of 8,192 tokens.

    python -m jaxtrain.main --config=configs/kimi_linear_48b.py --config.data.source=/path/to/text

For 64 accelerators of 80 GB or more in groups of 8 with fast links: the 256 experts of a layer on the 8 devices of a
group, all fully sharded across the groups. Three of four layers have Kimi delta attention, the others latent attention
without positions. Predicted for 64 H100: docs/performance.md. Speed and loss: not measured. Text given as it is becomes
bytes; `jaxtrain.data.prepare` makes a corpus with the published tokenizer. Variant: `:tiny` (seconds on a CPU).
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"kimi_linear_48b.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "kimi_linear", "vocab_size": 163840, "num_layers": 27, "embed_dim": 2304, "num_heads": 32,
                  "head_dim": 128, "rope_head_dim": 64, "value_head_dim": 128, "kv_rank": 512, "mlp_dim": 9216,
                  "layer_pattern": "DDDA" * 6 + "DDA", "state_heads": 32, "state_key_dim": 128,
                  "state_value_dim": 128, "dense_layers": 1, "num_experts": 256, "experts_per_token": 8,
                  "expert_mlp_dim": 1024, "shared_experts": 1, "router": "sigmoid", "router_scale": 2.446,
                  "router_bias_rate": 0.001, "balance_loss": 0.0001, "max_seq_len": 1048576, "norm_eps": 1e-5,
                  "tied_embeddings": False},
        "mesh": {"data": 1, "fsdp": -1, "expert": 8},
        "data": {"seq_len": 8192, "global_batch_size": 512},  # four million tokens
        "optimizer": {"learning_rate": 3e-4, "warmup_steps": 2000, "final_fraction": 0.1},
        "train": {"steps": 100_000, "accumulation": 8, "remat": "full", "eval_every": 1000},
    })
    if variant == "tiny":
        config.update({
            "model": {"vocab_size": 320, "num_layers": 5, "embed_dim": 64, "num_heads": 4, "head_dim": 16,
                      "rope_head_dim": 8, "value_head_dim": 16, "kv_rank": 32, "mlp_dim": 192,
                      "layer_pattern": "DDA", "state_heads": 4, "state_key_dim": 16, "state_value_dim": 16,
                      "num_experts": 8, "experts_per_token": 2, "expert_mlp_dim": 48, "max_seq_len": 64},
            "mesh": {"expert": 1},
            "data": {"seq_len": 64, "global_batch_size": 16},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
            "train": {"steps": 20, "accumulation": 1, "eval_every": 10},
            "checkpoint": {"every": 10},
        })
    return config
