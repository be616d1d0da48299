"""SigLIP B/16 (arXiv 2303.15343): both encoders of the published shape, over packed images of their own sizes.

    jaxtrain prepare_sequences images --label=text --tokenizer=FILE --input=FOLDER --output=PAIRS
    python -m jaxtrain.main --config=configs/siglip_b16.py --config.data.source=PAIRS

For 32 accelerators of 40 GB (fully sharded): 2,048 images of 256 patches a step, or more that are smaller. Speed and
accuracy: not measured. Variant: `:tiny` (seconds on a CPU, for images prepared with --patch_size=4
--patches_per_side=8).
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"siglip_b16.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "siglip", "vocab_size": 32000, "text_len": 64, "num_layers": 12, "embed_dim": 768,
                  "num_heads": 12, "image_layers": 12, "image_embed_dim": 768, "image_heads": 12,
                  "patch_size": 16, "patches_per_side": 64, "images_per_row": 16, "max_seq_len": 2048,
                  "norm_eps": 1e-6},
        "data": {"packing": "best_fit", "seq_len": 2048, "global_batch_size": 256, "augment": ["flip"]},
        "mesh": {"data": 1, "fsdp": -1},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 5000, "b2": 0.95, "weight_decay": 1e-4},
        "train": {"steps": 100_000, "eval_every": 1000},
    })
    if variant == "tiny":
        config.update({
            "model": {"vocab_size": 320, "text_len": 24, "num_layers": 2, "embed_dim": 64, "num_heads": 4,
                      "image_layers": 2, "image_embed_dim": 64, "image_heads": 4, "patch_size": 4,
                      "patches_per_side": 8, "images_per_row": 4, "max_seq_len": 128},
            "data": {"seq_len": 128, "global_batch_size": 8},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
            "train": {"steps": 20, "eval_every": 10},
            "checkpoint": {"every": 10},
        })
    return config
