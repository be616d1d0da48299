"""OLMo 2 7B, trained from random values: the published shape, in rows of 4,096 tokens.

    python -m jaxtrain.main --config=configs/olmo2_7b.py --config.data.source=/path/to/text

For 8 accelerators of 80 GB or more, up to 64: parameters and AdamW's moments take 88 GB, fully sharded over all of
them, and each layer keeps only its input for the backward pass. Speed and loss: not measured. Text given as it is
becomes bytes; `jaxtrain.data.prepare` makes a corpus with the published tokenizer.json. Variant: `:tiny` (seconds on a
CPU).
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"olmo2_7b.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "olmo2", "vocab_size": 100352, "num_layers": 32, "embed_dim": 4096, "num_heads": 32,
                  "mlp_dim": 11008, "max_seq_len": 4096, "norm_eps": 1e-6, "rope_theta": 500_000.0,
                  "tied_embeddings": False},
        "mesh": {"data": 1, "fsdp": -1},
        "data": {"seq_len": 4096, "global_batch_size": 256},  # a million tokens
        "optimizer": {"learning_rate": 3e-4, "warmup_steps": 2000, "final_fraction": 0.1},
        "train": {"steps": 100_000, "accumulation": 4, "remat": "full", "eval_every": 1000},
    })
    if variant == "tiny":
        config.update({
            "model": {"vocab_size": 320, "num_layers": 2, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 2,
                      "mlp_dim": 192, "max_seq_len": 64},
            "data": {"seq_len": 64, "global_batch_size": 16},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
            "train": {"steps": 20, "accumulation": 1, "eval_every": 10},
            "checkpoint": {"every": 10},
        })
    return config
