"""A Llama 3.2 1B decoder that reads images by an encoder of the shape of ViT B/16, trained from random values.

    jaxtrain prepare_sequences images --label=text --tokenizer=FILE --input=FOLDER --output=PAIRS
    python -m jaxtrain.main --config=configs/vision_language.py --config.data.source=PAIRS

For 8 accelerators of 80 GB (fully sharded). Speed and accuracy: not measured. `--config.train.freeze='["image/*"]'`
keeps the encoder as it is. Variant: `:tiny` (seconds on a CPU, for images prepared with --patch_size=4
--patches_per_side=8); examples/images.py trains one of that size with its data.
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"vision_language.py has no variant {variant!r}: known is tiny")
    config = ConfigDict({
        "model": {"name": "vision_language", "vocab_size": 128256, "num_layers": 16, "embed_dim": 2048, "num_heads": 32,
                  "num_kv_heads": 8, "head_dim": 64, "mlp_dim": 8192, "max_seq_len": 4096, "rope_theta": 500_000.0,
                  "image_layers": 12, "image_embed_dim": 768, "image_heads": 12, "images_per_row": 16},
        "data": {"packing": "best_fit", "seq_len": 4096, "global_batch_size": 64},
        "mesh": {"data": 1, "fsdp": -1},
        "optimizer": {"learning_rate": 3e-4, "warmup_steps": 1000},
        "train": {"steps": 20_000, "remat": "full", "eval_every": 1000},
    })
    if variant == "tiny":
        config.update({
            "model": {"vocab_size": 320, "num_layers": 2, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 4,
                      "head_dim": 16, "mlp_dim": 192, "max_seq_len": 128, "image_layers": 2, "image_embed_dim": 64,
                      "image_heads": 4, "patch_size": 4, "patches_per_side": 8, "images_per_row": 4},
            "data": {"seq_len": 128, "global_batch_size": 8},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 1},
            "train": {"steps": 20, "eval_every": 10},
            "checkpoint": {"every": 10},
        })
    return config
