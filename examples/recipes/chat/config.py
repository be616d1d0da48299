"""A chat model from raw text to answers, of nanochat's size: its model of 20 layers, pretrained. Not run yet.

    python -m jaxtrain.main --config=examples/recipes/chat/config.py --config.data.source=CORPUS

561 million parameters, half a million tokens a step, 11.2 billion in all: twenty for each parameter. What follows
pretraining is fine-tuning by configs/finetune.py. Variant: `:tiny`.
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"config.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "nanochat", "vocab_size": 65536, "num_layers": 20, "embed_dim": 1280, "num_heads": 10,
                  "num_kv_heads": 10, "mlp_dim": 5120, "max_seq_len": 2048, "tied_embeddings": False},
        "mesh": {"data": -1},
        "data": {"seq_len": 2048, "global_batch_size": 256},
        "optimizer": {"name": "muon", "learning_rate": 3e-3, "schedule": "wsd", "warmup_steps": 100},
        "train": {"steps": 21_400, "precision": "bfloat16", "eval_every": 250},
    })
    if variant == "tiny":
        config.update({"model": {"vocab_size": 320, "num_layers": 2, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 4,
                                 "mlp_dim": 256, "max_seq_len": 64},
                       "data": {"source": "stdlib", "seq_len": 64, "global_batch_size": 16},
                       "optimizer": {"warmup_steps": 1}, "train": {"steps": 2, "precision": "float32"}})
    return config
