"""Gemma 3 1B, trained from random values: the published shape of the text model, in rows of 4,096 tokens.

    python -m jaxtrain.main --config=configs/gemma3_1b.py --config.data.source=/path/to/text

For one accelerator of 40 GB or more, or several (fully sharded): parameters and AdamW's moments take 12 GB together.
Five of six layers see 512 tokens, the sixth all. Tensor parallelism cannot split the one key/value head: set
`--config.mesh.overrides.kv_heads=none --config.mesh.overrides.act_kv_heads=none` with `mesh.tensor`. Speed and loss:
not measured. Text given as it is becomes bytes; `jaxtrain.data.prepare` makes a corpus with the published tokenizer.
Variant: `:tiny` (seconds on a CPU).
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"gemma3_1b.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "gemma3", "vocab_size": 262144, "num_layers": 26, "embed_dim": 1152, "num_heads": 4,
                  "num_kv_heads": 1, "head_dim": 256, "mlp_dim": 6912, "max_seq_len": 32768, "window": 512,
                  "global_every": 6, "rope_theta": 1_000_000.0, "local_rope_theta": 10_000.0},
        "mesh": {"fsdp": -1, "data": 1},
        "data": {"seq_len": 4096, "global_batch_size": 64},  # a quarter of a million tokens
        "optimizer": {"learning_rate": 6e-4, "warmup_steps": 1000},
        "train": {"steps": 50_000, "remat": "full", "eval_every": 1000},
    })
    if variant == "tiny":
        config.update({
            "model": {"vocab_size": 320, "num_layers": 3, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 2,
                      "head_dim": 32, "mlp_dim": 192, "max_seq_len": 64, "window": 16, "global_every": 3},
            "data": {"seq_len": 64, "global_batch_size": 16},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
            "train": {"steps": 20, "eval_every": 10},
            "checkpoint": {"every": 10},
        })
    return config
