"""GPT-2 124M to a loss of 3.28 on FineWeb, the target of llm.c's and modded-nanogpt's speed runs. Not run yet.

    python -m jaxtrain.main --config=examples/recipes/gpt2_124m/config.py --config.data.source=CORPUS

The shape of configs/gpt.py:124m; half a million tokens a step, 10 billion in all, which is what llm.c's baseline needs
for 3.28 on its held-out FineWeb text. CORPUS is FineWeb with GPT-2's tokenizer. Variant: `:tiny`.
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"config.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "gpt2", "vocab_size": 50304, "num_layers": 12, "embed_dim": 768, "num_heads": 12,
                  "max_seq_len": 1024},
        "mesh": {"data": -1},
        "data": {"seq_len": 1024, "global_batch_size": 512},
        "optimizer": {"learning_rate": 1.8e-3, "warmup_steps": 256, "schedule": "wsd", "weight_decay": 0.1, "b2": 0.95},
        "train": {"steps": 19_073, "precision": "bfloat16", "eval_every": 250},
    })
    if variant == "tiny":
        config.update({"model": {"vocab_size": 320, "num_layers": 2, "embed_dim": 64, "num_heads": 4,
                                 "max_seq_len": 64},
                       "data": {"source": "stdlib", "seq_len": 64, "global_batch_size": 16},
                       "optimizer": {"warmup_steps": 1}, "train": {"steps": 2, "precision": "float32"}})
    return config
