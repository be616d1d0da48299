"""Llama 3.1 405B, trained from random values: the published shape, in rows of 8,192 tokens.

    python -m jaxtrain.main --config=configs/llama3_405b.py --config.data.source=/path/to/text

For 2,048 accelerators of 80 GB, fully sharded over all of them (3.2 GB of state a device, gradients included), one row
on each. By simulation (docs/performance.md) that reaches 52 % MFU on H100 with InfiniBand and takes 53 GB; with tensor
parallelism inside groups of 8 and the same rows it was 43 %. One process a host: add --coordinator, --num_processes and
--process_id, or start it under Slurm. It lowers for 2,048 devices on a laptop (tests/test_configs.py); speed and loss:
not measured. Text given as it is becomes bytes; `jaxtrain.data.prepare` makes a corpus with the published
tokenizer.json. Variant: `:tiny` (seconds on a CPU).
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"llama3_405b.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "llama", "vocab_size": 128256, "num_layers": 126, "embed_dim": 16384, "num_heads": 128,
                  "num_kv_heads": 8, "mlp_dim": 53248, "max_seq_len": 8192, "norm_eps": 1e-5, "rope_theta": 500_000.0,
                  "rope_scaling": 8.0, "rope_original_len": 8192, "tied_embeddings": False},
        "mesh": {"data": 1, "fsdp": -1},
        "data": {"seq_len": 8192, "global_batch_size": 2048},  # sixteen million tokens
        "optimizer": {"learning_rate": 8e-5, "warmup_steps": 8000, "final_fraction": 0.01},
        "train": {"steps": 500_000, "remat": "full", "eval_every": 1000},
    })
    if variant == "tiny":
        config.update({
            "model": {"vocab_size": 320, "num_layers": 4, "embed_dim": 64, "num_heads": 8, "num_kv_heads": 2,
                      "mlp_dim": 208, "max_seq_len": 64},
            "data": {"seq_len": 64, "global_batch_size": 16},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
            "train": {"steps": 20, "eval_every": 10},
            "checkpoint": {"every": 10},
        })
    return config
