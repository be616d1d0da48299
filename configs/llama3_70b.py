"""Llama 3.1 70B, trained from random values: the published shape, in rows of 8,192 tokens.

    python -m jaxtrain.main --config=configs/llama3_70b.py --config.data.source=/path/to/text

For 256 accelerators of 80 GB, fully sharded over all of them (4.4 GB of state a device, gradients included), two rows
on each at a time. By simulation (docs/performance.md) that reaches 52 % MFU on H100 with InfiniBand and takes 57 GB;
tensor parallelism inside groups of 8 with four micro-batches and full rematerialization reached 30 %. On 128 v5p add
--config.mesh.data=2 --config.data.seq_len=4096: 58 % and 74 GB, since XLA makes all-reduces of gathers over all chips.
One process a host: add --coordinator, --num_processes and --process_id, or start it under Slurm. It lowers for 256
devices on a laptop (tests/test_configs.py); speed and loss: not measured. Text given as it is becomes bytes;
`jaxtrain.data.prepare` makes a corpus with the published tokenizer.json. Variant: `:tiny` (seconds on a CPU).
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"llama3_70b.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "llama", "vocab_size": 128256, "num_layers": 80, "embed_dim": 8192, "num_heads": 64,
                  "num_kv_heads": 8, "mlp_dim": 28672, "max_seq_len": 8192, "norm_eps": 1e-5, "rope_theta": 500_000.0,
                  "rope_scaling": 8.0, "rope_original_len": 8192, "tied_embeddings": False},
        "mesh": {"data": 1, "fsdp": -1},
        "data": {"seq_len": 8192, "global_batch_size": 512},  # four million tokens
        "optimizer": {"learning_rate": 1.5e-4, "warmup_steps": 2000, "final_fraction": 0.1},
        "train": {"steps": 100_000, "remat": "attention", "eval_every": 1000},
    })
    if variant == "tiny":
        config.update({
            "model": {"vocab_size": 320, "num_layers": 3, "embed_dim": 64, "num_heads": 8, "num_kv_heads": 2,
                      "mlp_dim": 224, "max_seq_len": 64},
            "data": {"seq_len": 64, "global_batch_size": 16},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
            "train": {"steps": 20, "eval_every": 10},
            "checkpoint": {"every": 10},
        })
    return config
