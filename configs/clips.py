r"""A classifier that labels audio clips of some seconds: a small encoder, one GPU.

    jaxtrain prepare_sequences audio --input=FOLDERS --label=folder --output=SOUNDS
    python -m jaxtrain.main --config=configs/clips.py --config.data.source=SOUNDS --config.model.labels=10

A folder of clips for each label. `:tiny` is for a CPU.
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"clips.py has no variant {variant!r}: known is tiny")
    tiny = variant == "tiny"
    return ConfigDict({
        "model": {"name": "clips", "labels": 10, "num_layers": 2 if tiny else 6, "embed_dim": 64 if tiny else 256,
                  "num_heads": 4 if tiny else 8, "max_seq_len": 1024},
        "data": {"packing": "bucket", "seq_len": 64 if tiny else 512, "global_batch_size": 16 if tiny else 128},
        "optimizer": {"learning_rate": 3e-3 if tiny else 1e-3, "warmup_steps": 0.05},
        "train": {"steps": 60 if tiny else 10_000, "eval_every": 0.1},
    })
