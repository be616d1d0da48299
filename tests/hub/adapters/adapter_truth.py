"""Compute with Hugging Face's PEFT tiny published models with adapters, for the tests of adapters.

    python -m tests.hub.adapters.adapter_truth            # writes tests/hub/adapters/adapter_truth.json
    python -m tests.hub.adapters.adapter_truth --exports  # compares logits after PEFT loads what jaxtrain writes

Needs torch, transformers and peft, which the tests do not. It computes in float64.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch

from jaxtrain.hub.adapters import adapter_files
from jaxtrain.hub.weights import safetensors_files
from tests.hub import published
from tests.hub.adapters import published_adapters
from tests.hub.published_truth import torch_model


def logits_of(base: Path, adapters: Path) -> np.ndarray:
    """The logits of the model in `base` with the adapters in a folder, as PEFT loads both."""
    model = peft.PeftModel.from_pretrained(torch_model(base), adapters).double().eval()
    return model(torch.tensor(published.TOKENS, dtype=torch.long)).logits.detach().numpy().reshape(-1)


def made(base: Path, keys: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what PEFT writes of such adapters: its config and the shapes of its tensors."""
    model = peft.get_peft_model(torch_model(base).float(), peft.LoraConfig(task_type="CAUSAL_LM", **keys))
    model.save_pretrained(folder)
    config = json.loads((folder / adapter_files.CONFIG).read_text()) | {"base_model_name_or_path": "../base"}
    tensors = safetensors_files.tensors_of(folder, adapter_files.WEIGHTS)
    return {"config": config, "tensors": {name: tensor.shape for name, tensor in tensors.items()}}


def principal(base: Path, keys: dict[str, Any]) -> dict[str, list[float]]:
    """Return what PEFT's adapters begin with as PiSSA, by module: their product with a vector that follows from it."""
    model = peft.get_peft_model(torch_model(base).float(), peft.LoraConfig(
        task_type="CAUSAL_LM", init_lora_weights="pissa", **keys))
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, peft.tuners.lora.Linear):
            a, b = (part["default"].weight.detach().double().numpy() for part in (module.lora_A, module.lora_B))
            name = name.removeprefix("base_model.model.")
            along = published.weight(name, (a.shape[1],)).astype(np.float64)
            found[name] = [float(f"{x:.7g}") for x in module.scaling["default"] * b @ (a @ along)]
    return found


def exported(name: str, case: dict[str, Any]) -> float:
    """The largest error of the logits of the adapters that jaxtrain writes, relative to the largest logit."""
    with tempfile.TemporaryDirectory() as folder:
        base, run, params = published_adapters.loaded(Path(folder), name)
        (out := Path(folder) / "out").mkdir()
        adapter_files.save(params, run.config.model, run.config.lora, out, f"{base}", np.dtype(np.float32))
        logits, wanted = logits_of(base, out), np.asarray(case["logits"])
        return float(np.abs(logits - wanted).max() / np.abs(wanted).max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exports", action="store_true")
    if parser.parse_args().exports:
        errors = {name: exported(name, case) for name, case in published_adapters.truth().items()}
        print(*(f"{name:20} {error:.1e}" for name, error in errors.items()), sep="\n")
        return int(max(errors.values()) > 1e-6)
    cases = {}
    for name, (base_name, keys) in published_adapters.CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            base = published.write(Path(folder) / "base", published.truth(base_name))
            case = made(base, keys, Path(folder) / "made")
            adapters = published_adapters.write(Path(folder) / "adapters", case)
            cases[name] = case | {"logits": [float(f"{x:.9g}") for x in logits_of(base, adapters)]}
        print(name, len(case["tensors"]), "tensors")
    with tempfile.TemporaryDirectory() as folder:
        base_name, keys = published_adapters.PRINCIPAL
        starts = principal(published.write(Path(folder), published.truth(base_name)), keys)
    by = {"peft": peft.__version__, "torch": torch.__version__}
    published_adapters.TRUTH.write_text(json.dumps({"made_by": by, "cases": cases, "principal": starts},
                                                   separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
