"""Qwen2.5 0.5B, trained from random values: the published shape, in rows of 4,096 tokens.

    python -m jaxtrain.main --config=configs/qwen2p5_0p5b.py --config.data.source=/path/to/text

For one accelerator of 40 GB or more, or several (data parallel, at most 64): parameters and AdamW's moments take 6 GB
on each. Speed and loss: not measured. Text given as it is becomes bytes; `jaxtrain.data.prepare` makes a corpus with
the published tokenizer.json. Variant: `:tiny` (seconds on a CPU).
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"qwen2p5_0p5b.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "qwen2", "vocab_size": 151936, "num_layers": 24, "embed_dim": 896, "num_heads": 14,
                  "num_kv_heads": 2, "mlp_dim": 4864, "max_seq_len": 4096, "norm_eps": 1e-6,
                  "rope_theta": 1_000_000.0, "tied_embeddings": True},
        "data": {"seq_len": 4096, "global_batch_size": 64},  # a quarter of a million tokens
        "optimizer": {"learning_rate": 6e-4, "warmup_steps": 1000},
        "train": {"steps": 50_000, "remat": "full", "eval_every": 1000},
    })
    if variant == "tiny":
        config.update({
            "model": {"vocab_size": 320, "num_layers": 2, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 2,
                      "mlp_dim": 192, "max_seq_len": 64},
            "data": {"seq_len": 64, "global_batch_size": 16},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
            "train": {"steps": 20, "eval_every": 10},
            "checkpoint": {"every": 10},
        })
    return config
