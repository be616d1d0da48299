"""Adapters in PEFT's format for the tiny published models, and what PEFT computes of them.

`tests/hub/adapters/adapter_truth.py` makes the truth, with torch, transformers and peft; the tests need none of them.
"""

import json
from pathlib import Path

import jax
import numpy as np

import jaxtrain as jt
from jaxtrain.hub import trained_model
from jaxtrain.hub.adapters import adapter_files
from jaxtrain.hub.weights import safetensors_files
from tests.hub import published

TRUTH = Path(__file__).with_name("adapter_truth.json")
CASES = {  # name: (the case of published models, what PEFT's LoraConfig is given)
    "llama": ("llama_head_dim", {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}),
    "queries and values": ("qwen3", {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"],
                                     "use_rslora": True}),
    "gpt2": ("gpt2", {"r": 2, "lora_alpha": 4, "target_modules": ["c_attn", "attn.c_proj"], "fan_in_fan_out": True}),
    "gpt2, dora": ("gpt2", {"r": 2, "lora_alpha": 4, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True,
                            "use_dora": True}),
    "llama, dora": ("llama", {"r": 3, "lora_alpha": 6, "target_modules": "all-linear", "use_dora": True}),
    "gemma3": ("gemma3", {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}),
    "latents": ("deepseek_v3", {"r": 2, "lora_alpha": 4, "target_modules": [
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}),
    "inputs of layers": ("gemma4_inputs", {"r": 2, "lora_alpha": 4, "target_modules": [
        "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"]}),
}


PRINCIPAL = ("llama_head_dim", {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"})  # of PiSSA


def truth() -> dict:
    return json.loads(TRUTH.read_text())["cases"]


def write(folder: Path, case: dict) -> Path:
    """Write the adapters of a case as PEFT does, with tensors that follow from their names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / adapter_files.CONFIG).write_text(json.dumps(case["config"]))
    shapes = {name: tuple(shape) for name, shape in case["tensors"].items()}
    safetensors_files.write(folder / adapter_files.WEIGHTS, shapes, dict.fromkeys(shapes, np.float32),
                            (published.weight(name, shape) for name, shape in shapes.items()))
    return folder


def written(folder: Path, name: str) -> tuple[Path, Path]:
    """Write the model and the adapters of a case; return both folders."""
    base = published.write(folder / "base", published.truth(CASES[name][0]))
    return base, write(folder / "adapters", truth()[name])


def loaded(folder: Path, name: str, **mesh) -> tuple[Path, jt.Run, dict]:
    """The folder of a case's model, a run with its adapters, and all parameters."""
    base, adapters = written(folder, name)
    sections = trained_model.sections_of(adapters)
    config = {"model": sections["model"], "lora": sections["lora"], "data": {"seq_len": 8, "global_batch_size": 8},
              "mesh": mesh or {"data": 1}}
    run = jt.build(jt.make_config(config), devices=jax.devices()[:int(np.prod([*mesh.values()]))])
    params, _ = trained_model.load(adapters, run)
    return base, run, params
