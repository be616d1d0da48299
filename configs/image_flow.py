"""Flow matching of labelled images: a vision transformer of the shape of DiT B, on pixels, in patches of 4 x 4.

    jaxtrain prepare_sequences images --input=FOLDERS --label=folder --patch_size=4 --output=LABELLED
    python -m jaxtrain.main --config=configs/image_flow.py --config.data.source=LABELLED

One accelerator or several (data parallel, at most 64). Speed and quality: not measured. Variant: `:tiny` (seconds on a
CPU).
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"image_flow.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "image_flow", "num_labels": 10, "num_layers": 12, "embed_dim": 768, "num_heads": 12,
                  "patch_size": 4, "patches_per_side": 64, "images_per_row": 8, "max_seq_len": 1024},
        "data": {"packing": "best_fit", "seq_len": 1024, "global_batch_size": 64, "augment": ["flip"]},
        "optimizer": {"learning_rate": 2e-4, "warmup_steps": 1000, "weight_decay": 0.0},
        "train": {"steps": 100_000, "eval_every": 1000, "ema_decay": 0.999},
    })
    if variant == "tiny":
        config.update({
            "model": {"num_layers": 2, "embed_dim": 64, "num_heads": 4, "images_per_row": 4, "max_seq_len": 128},
            "data": {"seq_len": 128, "global_batch_size": 8},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
            "train": {"steps": 20, "eval_every": 10},
            "checkpoint": {"every": 10},
        })
    return config
