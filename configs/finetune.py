"""Fine-tuning on answers: a model that is there learns from conversations, or from prompts with completions.

    python -m jaxtrain.main --config=configs/finetune.py:lora:FOLDER --config.data.source=CORPUS --workdir=runs/tuned

FOLDER is a published model or the workdir of a run, and CORPUS was prepared with its tokenizer (docs/tuning.md). Only
what the assistant says is trained on; rows are packed. Variants: `all:FOLDER` trains all weights, `lora:FOLDER`
adapters on all linear layers, `qlora:FOLDER` the same beside weights in 4 bits; `tiny` is a small model that begins at
random, for tests. Set `train.steps` to what the corpus needs: `jaxtrain inspect` says how many rows it has.
"""

import runpy
from pathlib import Path

WAYS = {  # learning rate, adapters
    "all": (1e-5, {}),
    "lora": (1e-4, {"rank": 16}),
    "qlora": (1e-4, {"rank": 16, "quantize": "nf4"}),
}


def get_config(variant=None):
    from jaxtrain.hub.trained_model import sections_of

    way, _, folder = (variant or "tiny").partition(":")
    config = runpy.run_path(str(Path(__file__).with_name("gpt.py")))["get_config"]("tiny")
    config.data.packing = "best_fit"
    if way == "tiny" and not folder:
        return config
    if way not in WAYS or not folder:
        raise ValueError(f"finetune.py has no variant {variant!r}: known are tiny, "
                         f"{', '.join(f'{name}:FOLDER' for name in WAYS)}")
    rate, lora = WAYS[way]
    del config["model"]
    config.model = sections_of(folder, text=True)["model"]
    config.data.update({"seq_len": min(2048, config.model.get("max_seq_len", 1024)), "global_batch_size": 16})
    config.optimizer.update({"learning_rate": rate, "schedule": "cosine", "warmup_steps": 0.03, "weight_decay": 0.0})
    config.train.update({"steps": 300, "init_from": folder, "unroll": -1})
    config.lora = lora
    return config
