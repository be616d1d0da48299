"""Continued pretraining of a published model of 1B parameters (the shape of Llama 3.2 1B). Not run yet.

    python -m jaxtrain.main --config=examples/recipes/continued_1b/config.py --config.train.init_from=FOLDER

with `--config.data.source=CORPUS`, text that was prepared with the tokenizer of the model in FOLDER.

Ten billion tokens, the learning rate warmed up anew and falling to zero in the last fifth (arXiv 2403.08763).
configs/continued.py shows how to mix in some of the old text. Variant: `:tiny`.
"""

import runpy
from pathlib import Path


def get_config(variant=None):
    config = runpy.run_path(f"{Path(__file__).parents[3]}/configs/llama3_1b.py")["get_config"](variant)
    config.optimizer.update({"schedule": "wsd", "decay_fraction": 0.2, "final_fraction": 0.0, "learning_rate": 1e-4})
    if variant is None:
        config.mesh = {"data": 1, "fsdp": -1}
        config.data.update({"global_batch_size": 128})
        config.optimizer.warmup_steps = 200
        config.train.update({"steps": 19_073, "precision": "bfloat16"})
    return config
