"""Nemotron-H 8B, trained from random values: the published shape, in rows of 8,192 tokens.

    python -m jaxtrain.main --config=configs/nemotron_h_8b.py --config.data.source=/path/to/text

For 8 accelerators of 80 GB or more, up to 128, fully sharded over all of them. 24 layers are Mamba-2, 24 an MLP, and
four attention without positions. Predicted for 8 H100: docs/performance.md. Speed and loss: not measured. Text given as
it is becomes bytes; `jaxtrain.data.prepare` makes a corpus with the published tokenizer.json. Variant: `:tiny` (seconds
on a CPU).
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"nemotron_h_8b.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "nemotron_h", "vocab_size": 131072, "num_layers": 52, "embed_dim": 4096, "num_heads": 32,
                  "num_kv_heads": 8, "head_dim": 128, "mlp_dim": 21504, "state_heads": 128, "state_head_dim": 64,
                  "state_groups": 8, "state_dim": 128, "max_seq_len": 8192, "norm_eps": 1e-5,
                  "layer_pattern": "MFMFMFMAF" + "MFMFMFMFMAF" * 3 + "MF" * 5, "tied_embeddings": False},
        "mesh": {"data": 1, "fsdp": -1},
        "data": {"seq_len": 8192, "global_batch_size": 128},  # a million tokens
        "optimizer": {"learning_rate": 3e-4, "warmup_steps": 2000, "final_fraction": 0.1},
        "train": {"steps": 100_000, "accumulation": 4, "remat": "full", "eval_every": 1000},
    })
    if variant == "tiny":
        config.update({
            "model": {"vocab_size": 320, "num_layers": 4, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 2,
                      "head_dim": 16, "mlp_dim": 192, "state_heads": 8, "state_head_dim": 16, "state_groups": 2,
                      "state_dim": 16, "max_seq_len": 64, "layer_pattern": "MFAF"},
            "data": {"seq_len": 64, "global_batch_size": 16},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
            "train": {"steps": 20, "accumulation": 1, "eval_every": 10},
            "checkpoint": {"every": 10},
        })
    return config
