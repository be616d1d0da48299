"""Write tests/train_step/optimizers/muon_truth.json: what torch.optim.Muon makes of a few matrices.

    python -m tests.train_step.optimizers.muon_truth

Needs torch. Gradients are those of `gradients`, which the tests draw again; torch computes Newton-Schulz in bfloat16.
"""

import json
from pathlib import Path

import numpy as np

PATH = Path(__file__).with_suffix(".json")
SHAPES = {"wide": (4, 10), "tall": (12, 5), "square": (8, 8)}  # torch's: outputs x inputs
STEPS, LEARNING_RATE, MOMENTUM, DECAY = 3, 0.05, 0.9, 0.1


def initial() -> dict[str, np.ndarray]:
    """The matrices before the first step."""
    rng = np.random.default_rng(7)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, np.ndarray]:
    """The gradients of a step."""
    rng = np.random.default_rng(100 + step)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def main() -> None:
    """Write the matrices after each step, scaled like AdamW's."""
    import torch

    params = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in initial().items()}
    optimizer = torch.optim.Muon(params.values(), lr=LEARNING_RATE, weight_decay=DECAY, momentum=MOMENTUM,
                                 adjust_lr_fn="match_rms_adamw")
    found = []
    for step in range(STEPS):
        for name, grad in gradients(step).items():
            params[name].grad = torch.tensor(grad)
        optimizer.step()
        found.append({name: [[round(x, 6) for x in row] for row in matrix.tolist()]
                      for name, matrix in params.items()})
    PATH.write_text(json.dumps({"torch": torch.__version__.partition("+")[0], "steps": found}) + "\n")


if __name__ == "__main__":
    main()
