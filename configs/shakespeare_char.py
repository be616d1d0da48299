"""Character-level Shakespeare: the shape and settings of nanoGPT's train_shakespeare_char.py, 10.8 million parameters.

    python -m jaxtrain.main --config=configs/shakespeare_char.py --workdir=runs/shakespeare_char

The corpus is made first, as docs/data.md shows. For one accelerator. nanoGPT publishes a validation loss of 1.4697 for
its own program, which has dropout of 0.2 and no biases; models here have biases and no dropout, so that this run
overfits sooner. Its loss was not measured. Variant: `:tiny` (seconds on a CPU, on Python's own library).
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"shakespeare_char.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "gpt2", "vocab_size": 66, "num_layers": 6, "embed_dim": 384,  # 65 characters and an end
                  "num_heads": 6, "max_seq_len": 256},
        "data": {"source": "corpora/shakespeare_char", "seq_len": 256, "global_batch_size": 64},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 100, "b2": 0.99},
        "train": {"steps": 5000, "eval_every": 250},
        "checkpoint": {"every": 250},
    })
    if variant == "tiny":
        config.update({
            "model": {"vocab_size": 320, "num_layers": 2, "embed_dim": 64, "num_heads": 4, "max_seq_len": 64},
            "data": {"source": "stdlib", "seq_len": 64, "global_batch_size": 16},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
            "train": {"steps": 20, "eval_every": 10},
            "checkpoint": {"every": 10},
        })
    return config
