"""Write the batches that runs were trained on, and the one after the last, for peers to train on the same.

    python -m examples.recipes.smol.batches WORKDIR ...    # writes WORKDIR/batches.npz
"""

import sys
from pathlib import Path

import numpy as np

import jaxtrain as jt

if __name__ == "__main__":
    for workdir in map(Path, sys.argv[1:]):
        run = jt.build(jt.load_config(workdir / "config.json"))
        batches = [run.batch(step) for step in range(run.config.train.steps + 1)]
        np.savez(workdir / "batches.npz", **{name: np.stack([batch[name] for batch in batches])
                                             for name in ("tokens", "targets", "segments", "weights")})
