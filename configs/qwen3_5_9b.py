"""Qwen3.5 9B (the text model), trained from random values: the published shape, in rows of 8,192 tokens.

    python -m jaxtrain.main --config=configs/qwen3_5_9b.py --config.data.source=/path/to/text

For 8 accelerators of 80 GB or more, up to 128: parameters and AdamW's moments take 107 GB, fully sharded over all of
them. Three of four layers have Gated DeltaNet, the fourth gated attention. Predicted for 8 H100: docs/performance.md.
Speed and loss: not measured. Text given as it is becomes bytes; `jaxtrain.data.prepare` makes a corpus with the
published tokenizer.json. Variant: `:tiny` (seconds on a CPU).
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"qwen3_5_9b.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "qwen3_5", "vocab_size": 248320, "num_layers": 32, "embed_dim": 4096, "num_heads": 16,
                  "num_kv_heads": 4, "head_dim": 256, "mlp_dim": 12288, "layer_pattern": "DDDA", "state_heads": 32,
                  "state_key_heads": 16, "state_key_dim": 128, "state_value_dim": 128, "max_seq_len": 32768,
                  "norm_eps": 1e-6, "rope_theta": 10_000_000.0, "tied_embeddings": False},
        "mesh": {"data": 1, "fsdp": -1},
        "data": {"seq_len": 8192, "global_batch_size": 128},  # a million tokens
        "optimizer": {"learning_rate": 3e-4, "warmup_steps": 2000, "final_fraction": 0.1},
        "train": {"steps": 100_000, "accumulation": 4, "remat": "full", "eval_every": 1000},
    })
    if variant == "tiny":
        config.update({
            "model": {"vocab_size": 320, "num_layers": 4, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 2,
                      "head_dim": 32, "mlp_dim": 192, "state_heads": 4, "state_key_heads": 2, "state_key_dim": 16,
                      "state_value_dim": 16, "max_seq_len": 64},
            "data": {"seq_len": 64, "global_batch_size": 16},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
            "train": {"steps": 20, "accumulation": 1, "eval_every": 10},
            "checkpoint": {"every": 10},
        })
    return config
