"""OLMo 3 7B, trained from random values: the published shape, in rows of 8,192 tokens.

    python -m jaxtrain.main --config=configs/olmo3_7b.py --config.data.source=/path/to/text

OLMo 2 7B (olmo2_7b.py) with a window of 4,096 tokens in three of four layers. For 8 accelerators of 80 GB or more, up
to 64; predicted for 8 H100: docs/performance.md. Speed and loss: not measured. Text given as it is becomes bytes;
`jaxtrain.data.prepare` makes a corpus with the published tokenizer.json. Variant: `:tiny` (seconds on a CPU).
"""

import runpy
from pathlib import Path


def get_config(variant=None):
    config = runpy.run_path(str(Path(__file__).with_name("olmo2_7b.py")))["get_config"](variant)
    config.model.update({"name": "olmo3", "window": 16, "global_every": 2})
    if variant is None:
        config.model.update({"vocab_size": 100278, "max_seq_len": 8192, "window": 4096, "global_every": 4})
        config.data.update({"seq_len": 8192, "global_batch_size": 128})  # a million tokens
    return config
