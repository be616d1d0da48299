r"""A model that predicts a user's next event from earlier ones: about 10 M parameters and the columns of the corpus.

    jaxtrain prepare_sequences events --input=TABLES --user=user --time=at --category item \
        --output=CLICKS
    python -m jaxtrain.main --config=configs/events.py --config.data.source=CLICKS --config.model.categories.item=5000

One GPU; `:tiny` is for a CPU. docs/data-sequences.md has an example with its data.
"""

from ml_collections import ConfigDict


def get_config(variant=None):
    if variant not in (None, "tiny"):
        raise ValueError(f"events.py has no variant {variant!r}: known is tiny")
    tiny = variant == "tiny"
    return ConfigDict({
        "model": {"name": "events", "categories": {"item": 64 if tiny else 50_000}, "num_layers": 2 if tiny else 8,
                  "embed_dim": 64 if tiny else 256, "num_heads": 4 if tiny else 8, "max_seq_len": 1024},
        "data": {"packing": "bucket", "seq_len": 64 if tiny else 512, "global_batch_size": 16 if tiny else 128},
        "optimizer": {"learning_rate": 3e-3 if tiny else 1e-3, "warmup_steps": 0.05},
        "train": {"steps": 60 if tiny else 20_000, "eval_every": 0.1},
    })
