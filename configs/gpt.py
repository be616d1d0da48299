"""A small byte-level GPT on the source code of Python's own standard library.

    python -m jaxtrain.main --config=configs/gpt.py

About a minute on 2 CPU cores. Variants: `:tiny` (seconds, for tests), `:124m` (the shape of GPT-2 small; wants
an accelerator). On an accelerator the default is a larger model that keeps one busy for minutes.
"""

import jax
from ml_collections import ConfigDict


def get_config(variant=None):
    accelerator = jax.default_backend() != "cpu"
    variant = variant or ("accelerator" if accelerator else "cpu")
    devices = jax.device_count() if accelerator else 1
    shapes = {  # layers, width, heads, context, sequences per step, steps, learning rate
        "tiny": (2, 64, 4, 64, 16, 20, 3e-3),
        "cpu": (4, 128, 4, 128, 8, 300, 1e-2),
        "accelerator": (8, 512, 8, 1024, 64 * devices, 1000, 1.5e-3),
        "124m": (12, 768, 12, 1024, 64 * devices, 2000, 6e-4),
    }
    if variant not in shapes:
        raise ValueError(f"gpt.py has no variant {variant!r}: known are {', '.join(shapes)}")
    layers, width, heads, context, sequences, steps, rate = shapes[variant]
    return ConfigDict({
        "model": {"name": "gpt2", "vocab_size": 50304 if variant == "124m" else 320, "num_layers": layers,
                  "embed_dim": width, "num_heads": heads, "max_seq_len": context},
        "data": {"source": "stdlib", "seq_len": context, "global_batch_size": sequences},
        # Muon learns as much here in a quarter of the tokens that AdamW needs: patience is scarcer than arithmetic.
        "optimizer": {"name": "muon" if variant == "cpu" else "adamw", "learning_rate": rate, "warmup_steps": 0.05},
        "train": {"steps": steps, "eval_every": 0.25, "sample_tokens": 0 if variant == "tiny" else 200,
                  "unroll": -1 if accelerator else 0},
        "checkpoint": {"every": 0.25},
    })
