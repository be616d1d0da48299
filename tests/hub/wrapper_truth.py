"""Compute with Hugging Face's transformers tiny multimodal models, of which jaxtrain reads the language model.

    python -m tests.hub.wrapper_truth    # writes tests/hub/wrapper_truth.json

Needs torch and transformers, which the tests do not. Kept are config.json, the shapes of all tensors as they are on
disk, and the logits of text alone, computed in float64. The cases of which a name ends with "own_head" have an output
projection in the files that config.json does not tell of, as Mistral Small 3 has.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from jaxtrain.hub.weights import safetensors_files
from tests.hub import published, published_truth

TRUTH = Path(__file__).with_name("wrapper_truth.json")
TEXT = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "intermediate_size": 20, "max_position_embeddings": 40, "rms_norm_eps": 1e-5}
DELTA = TEXT | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 6}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
         "patch_size": 4}
PIXTRAL = TOWER | {"model_type": "pixtral", "head_dim": 8}
QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
        "num_position_embeddings": 16, "patch_size": 4, "deepstack_visual_indexes": []}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name: (class, keys)
    "qwen3_5": ("Qwen3_5", {"text_config": DELTA | {"mtp_num_hidden_layers": 1}, "vision_config": QWEN}),
    "qwen3_5_moe": ("Qwen3_5Moe", {"text_config": DELTA | ROUTED, "vision_config": QWEN}),
    "gemma3": ("Gemma3", {"text_config": TEXT | {"sliding_window": 4, "query_pre_attn_scalar": 8},
                          "vision_config": TOWER | {"vision_use_head": False}, "mm_tokens_per_image": 4}),
    "mistral3": ("Mistral3", {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": PIXTRAL}),
    "mistral3_own_head": ("Mistral3", {"text_config": TEXT | {"model_type": "ministral3"}, "vision_config": PIXTRAL}),
    "llama4": ("Llama4", {
        "text_config": TEXT | {"intermediate_size_mlp": 20, "num_local_experts": 4, "interleave_moe_layer_step": 2,
                               "pad_token_id": 0},
        "vision_config": TOWER | {"intermediate_size": 64, "vision_output_dim": 16, "projector_input_dim": 16,
                                  "projector_output_dim": 16}}),
}


def made(name: str, folder: Path) -> dict[str, Any]:
    """Return what transformers writes to disk: config.json and the shapes of tensors, joined for mixtures of Qwen."""
    start, keys = CASES[name]
    kind = getattr(transformers, f"{start}ForConditionalGeneration")
    kind(kind.config_class(**keys)).save_pretrained(folder, save_original_format=not name.endswith("moe"))
    config = json.loads((folder / "config.json").read_text())
    tensors = {key: tensor.shape for key, tensor in safetensors_files.tensors_of(folder).items()}
    if name.endswith("own_head"):
        config.pop("tie_word_embeddings")  # true unless said
        tensors["language_model.lm_head.weight"] = (TEXT["vocab_size"], TEXT["hidden_size"])
    return {"config": config, "tensors": tensors}


def computed(name: str, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a case with the logits of text."""
    kind = getattr(transformers, f"{CASES[name][0]}ForConditionalGeneration")
    model = published_truth.torch_model(published.write(folder, case), kind)
    model = model.language_model if name == "llama4" else model  # whose whole does not compute without images
    with published_truth.in_float64(), torch.no_grad():
        logits = model(input_ids=torch.tensor(published.TOKENS, dtype=torch.long)).logits
    return case | {"logits": [float(f"{x:.9g}") for x in logits.numpy().reshape(-1)]}


def main() -> int:
    found: dict[str, Any] = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            found[name] = computed(name, made(name, Path(one)), Path(other))
    TRUTH.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
