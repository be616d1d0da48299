"""Tiny published models with layers that predict further tokens: those of `tests.hub.cases`, with more tensors."""

import json
import re
from pathlib import Path

import numpy as np

from tests.hub import published

TRUTH = Path(__file__).with_name("multi_token_truth.json")
LOSS_WEIGHT = 0.3
CASES = {"deepseek_v3": 2, "glm4_moe": 1, "qwen3_next": 1, "qwen3_5": 1}  # how many layers
KEYS = {"qwen3_5": "mtp_num_hidden_layers"}  # of config.json, where it is not the following
KEY = "num_nextn_predict_layers"


def case(name: str) -> dict:
    """The config.json and shapes of the tensors of a case."""
    plain, layers = published.truth(name), CASES[name]
    last = plain["config"]["num_hidden_layers"] - 1
    block = {key.removeprefix(f"model.layers.{last}."): shape for key, shape in plain["tensors"].items()
             if key.startswith(f"model.layers.{last}.")}
    table = plain["tensors"]["model.embed_tokens.weight"]
    wide, found = table[1], {}
    for n in range(layers):
        if name.startswith("qwen"):
            found |= {f"mtp.layers.0.{key}": shape for key, shape in block.items()} | {
                "mtp.fc.weight": [wide, 2 * wide]} | {
                    f"mtp.{key}.weight": [wide] for key in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
        else:
            at = f"model.layers.{last + 1 + n}"
            found |= {f"{at}.{key}": shape for key, shape in block.items()} | {
                f"{at}.eh_proj.weight": [wide, 2 * wide], f"{at}.embed_tokens.weight": table,
                f"{at}.shared_head.head.weight": table} | {
                    f"{at}.{key}.weight": [wide] for key in ("enorm", "hnorm", "shared_head.norm")}
    return {"config": plain["config"] | {KEYS.get(name, KEY): layers}, "tensors": plain["tensors"] | found}


def weight(name: str, shape) -> np.ndarray:
    """A tensor that follows from its name, or the one that it is a copy of."""
    name = re.sub(r"model\.layers\.\d+\.embed_tokens", "model.embed_tokens", name)
    return published.weight(re.sub(r".*\.shared_head\.head", "lm_head", name), shape)


def write(folder: Path, name: str, without: str = "") -> Path:
    """Write the folder of a case, without tensors whose names have this in them."""
    whole = case(name)
    kept = {key: shape for key, shape in whole["tensors"].items() if not without or without not in key}
    return published.write(folder, whole | {"tensors": kept}, weight=weight)


def truth(name: str) -> dict:
    """Return what transformers computes of a case."""
    return json.loads(TRUTH.read_text())[name]
