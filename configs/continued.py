"""Continued pretraining: the model of gpt.py learns other text, and rereads some of the old so as not to forget it.

    python -m jaxtrain.main --config=configs/continued.py --config.train.init_from=WORKDIR --workdir=runs/continued

WORKDIR is that of a run of gpt.py, of the same variant.

Three things of it are what such runs usually need: a quarter of the rows are the old text (replay), the learning rate
is warmed up again and stays high until the last fifth (arXiv 2403.08763), and in that fifth, while it falls to zero,
half of the rows are the best text (annealing, arXiv 2404.06395), here again the new one's. Variants are those of
gpt.py. For a model of your own change the sources and take over its `model` section.
"""

import runpy
from pathlib import Path


def get_config(variant=None):
    config = runpy.run_path(str(Path(__file__).with_name("gpt.py")))["get_config"](variant)
    steps = config.train.steps = max(20, config.train.steps // 2)
    del config.data["source"]
    here = Path(__file__).parents[1]
    config.data.mixture = {"new": {"source": str(here / "docs"), "weight": 2},
                           "best": {"source": str(here / "README.md"), "weight": 1},
                           "replay": {"source": "stdlib", "weight": 1}}
    config.data.stages = [{"from_step": steps * 4 // 5, "weights": {"new": 1, "best": 2, "replay": 1}}]
    config.optimizer.update({"schedule": "wsd", "decay_fraction": 0.2, "final_fraction": 0.0, "warmup_steps": 0.02,
                             "learning_rate": config.optimizer.learning_rate / 2})
    return config
