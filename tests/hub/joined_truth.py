"""Record how Hugging Face's transformers names and joins in memory the tensors of tiny published models.

    python -m tests.hub.joined_truth    # writes tests/hub/joined_truth.json

Needs torch and transformers, which the tests do not. Folders may have either form: it is written with
`save_original_format=False`. Kept is, for each tensor that it writes otherwise, its shape and the tensors of
`tests.hub.published_truth` of which it has the numbers, one after the other.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from jaxtrain.hub.weights import safetensors_files
from tests.hub import published, published_truth
from tests.hub.cases import CASES

TRUTH = Path(__file__).with_name("joined_truth.json")
# One of each type whose tensors are joined or renamed, which is of more experts than are worth their names.
LEFT_OUT = {"kimi_k2", "qwen3_moe_sparse", "qwen2_moe_sparse", "granitemoeshared", "deepseek_v2_lite", "nemotron_h_moe",
            "ernie4_5_moe_sparse", "deepseek_v3_plain", "qwen3_next_dense", "olmo_hybrid_no_rope"}


def made_of(tensor: np.ndarray, others: dict[str, np.ndarray]) -> list[str]:
    """Return the names of the tensors whose numbers a tensor has, one after the other."""
    flat, found, at = tensor.reshape(-1), [], 0
    while at < flat.size:
        found.append(next(name for name, other in others.items()
                          if np.array_equal(flat[at:at + other.size], other.reshape(-1))))
        at += others[found[-1]].size
    return found


def joined(name: str, scratch: Path) -> dict[str, tuple[list[int], list[str]]]:
    """Return what transformers writes otherwise of a case."""
    folder, to = published.write(scratch / "in", published.truth(name)), scratch / "out"
    published_truth.torch_model(folder).float().save_pretrained(to, save_original_format=False)
    before, after = ({key: np.array(tensor.view()) for key, tensor in safetensors_files.tensors_of(each).items()}
                     for each in (folder, to))
    return {key: ([*tensor.shape], made_of(tensor, before)) for key, tensor in after.items()
            if key not in before or not np.array_equal(tensor, before[key])}


def main() -> int:
    found = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            if name not in LEFT_OUT and (each := joined(name, Path(scratch))):
                found[name] = each
                print(name, len(each))
    TRUTH.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
