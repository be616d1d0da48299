"""Tiny published models: their config.json, weights that follow from their names, and what transformers computes.

`tests/hub/published_truth.py` makes the truth, with torch and transformers; the tests need neither.
"""

import json
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxtrain.hub.weights import safetensors_files

TRUTH = Path(__file__).with_name("published_truth")  # a file for each of `tests.hub.cases.CASES`
# Without 0, the padding of Gemma, whose gradient transformers leaves out.
TOKENS = np.random.default_rng(7).integers(1, 24, (2, 12)).astype(np.int32)
PROMPTS, NEW = TOKENS[:, :8], 32  # what is continued, and by how many tokens


def weight(name: str, shape) -> np.ndarray:
    """A tensor that follows from its name, of numbers that bfloat16 holds."""
    numbers = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape) * (0.3 if len(shape) > 1 else 0.1)
    if len(shape) == 1 and "norm" in name + name.replace("ln_", "norm") and name.endswith("weight"):
        numbers += 1
    if name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
        numbers += 1
    return numbers.astype(ml_dtypes.bfloat16).astype(np.float32)


def projections(name: str, tensor: np.ndarray) -> list[float]:
    """A tensor's norm, and its products with two tensors that follow from its name."""
    others = np.random.default_rng(zlib.crc32(f"{name} projected".encode())).normal(size=(2, tensor.size))
    return [float(np.linalg.norm(tensor)), *(others @ np.asarray(tensor, np.float64).reshape(-1)).tolist()]


def truth(name: str) -> dict:
    """The truth of a case by transformers: config.json, shapes of tensors, logits, loss, gradients."""
    return json.loads((TRUTH / f"{name}.json").read_text())


def write(folder: Path, case: dict, dtype=np.float32, weight=weight) -> Path:
    """Write the folder of a case as transformers does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case["config"]))
    shapes = {name: tuple(shape) for name, shape in case["tensors"].items()}
    safetensors_files.write(folder / safetensors_files.SINGLE, shapes, dict.fromkeys(shapes, dtype),
                            (weight(name, shape) for name, shape in shapes.items()))
    return folder
