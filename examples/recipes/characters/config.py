"""nanoGPT's characters of Shakespeare on a CPU: the settings that its README gives for a machine without a GPU.

    python -m jaxtrain.main --config=examples/recipes/characters/config.py --config.data.source=CORPUS

Four layers of width 128, blocks of 64 characters, 12 of them a step, 2,000 steps, no dropout (karpathy/nanoGPT,
README, "I only have a macbook"). nanoGPT reports a validation loss of 1.88 for its own program. Variant: `:tiny`.
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"config.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "gpt2", "vocab_size": 66, "num_layers": 4, "embed_dim": 128, "num_heads": 4,
                  "max_seq_len": 64},
        "data": {"seq_len": 64, "global_batch_size": 12},
        "optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "final_fraction": 0.1, "warmup_steps": 100,
                      "b2": 0.99, "weight_decay": 0.1, "clip_norm": 1.0},
        "train": {"steps": 2000, "eval_every": 500, "eval_batches": 145},  # all of the held-out text
        "checkpoint": {"every": 0},
    })
    if variant == "tiny":
        config.update({"model": {"vocab_size": 320, "embed_dim": 32, "num_layers": 1},
                       "optimizer": {"warmup_steps": 1}, "train": {"steps": 2, "eval_every": 1}})
    return config
