"""A published folder whose linear layers are in 4 bits, as transformers, vLLM and SGLang read it (compressed-tensors).

The form is "pack-quantized" of github.com/vllm-project/compressed-tensors: beside each `weight_packed`, eight numbers
in an int32, lie the scales of groups of inputs, in bfloat16, and the shape. Embeddings, norms and the head stay as they
are.
"""

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files, bounded_files
from jaxtrain.hf.hf_config import FILE
from jaxtrain.hub import export
from jaxtrain.hub.folders import published_files
from jaxtrain.hub.release import gptq
from jaxtrain.hub.weights import safetensors_files
from jaxtrain.hub.weights.safetensors_files import DTYPES

WORDS = 8  # numbers in an int32
_LINEAR = re.compile(r".*\.layers\.\d+\..*_proj\.weight")


def write(folder: Path, to: Path, group: int = 128, moments: Mapping[str, np.ndarray] | None = None,
          file_bytes: int = 4 * 10**9, overwrite: bool = False) -> JsonObject:
    """Write a folder in 4 bits, which appears when it is whole; return what its export.json says.

    Args:
        folder: the published model.
        to: the folder to make.
        group: how many inputs share a scale.
        moments: of the inputs of layers, by the names of tensors (calibration.py); None rounds to the nearest.
        file_bytes: the most that a file of several tensors has.
        overwrite: replace an earlier one.
    """
    export.check_is_new(to, overwrite)
    tensors = safetensors_files.tensors_of(folder)
    narrow = narrow_layers(folder, tensors, group)
    shapes: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, np.dtype] = {}
    for name, tensor in tensors.items():
        if name not in narrow:
            shapes[name], kinds[name] = tensor.shape, dtype_of(tensor)
            continue
        out, inputs = tensor.shape
        for part, shape, kind in (("packed", (out, inputs // WORDS), np.int32),
                                  ("scale", (out, inputs // group), ml_dtypes.bfloat16), ("shape", (2,), np.int64)):
            shapes[f"{name}_{part}"], kinds[f"{name}_{part}"] = shape, np.dtype(kind)
    made: dict[str, np.ndarray] = {}

    def computed(name: str) -> np.ndarray:
        if name in tensors:
            return tensors[name].view()
        of, _, part = name.rpartition("_")
        if part == "packed":
            made.clear()
            numbers, scales = gptq.rounded(tensors[of].view(), group, None if moments is None else moments.get(of))
            made.update(packed=packed(numbers), scale=scales.astype(ml_dtypes.bfloat16),
                        shape=np.array(tensors[of].shape, np.int64))
        return made[part]

    record = {"source": folder.resolve().name, "format": "int4", "group": group,
              "rounding": "nearest" if moments is None else "gptq"}
    save(folder, to, shapes, kinds, computed, _described(group), record, file_bytes, overwrite)
    return record


def narrow_layers(folder: Path, tensors: Mapping[str, safetensors_files.Tensor], group: int) -> set[str]:
    """Return the names of the linear layers of a model."""
    narrow = [name for name, tensor in tensors.items() if _LINEAR.fullmatch(name) and len(tensor.shape) == 2]
    if not narrow:
        raise UserError("--format", f"{folder} has no linear layers named as Llama's are", "export it as it is")
    if wrong := [name for name in narrow if tensors[name].shape[1] % group]:
        raise UserError("--group", f"{wrong[0]} has {tensors[wrong[0]].shape[1]} inputs, no multiple of {group}",
                        "give a divisor, such as 32")
    return set(narrow)


def dtype_of(tensor: safetensors_files.Tensor) -> np.dtype:
    """Return the dtype of a tensor that stays as it is."""
    return np.dtype(DTYPES[tensor.dtype])


def save(folder: Path, to: Path, shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, np.dtype],
         computed: Callable[[str], np.ndarray], described: JsonObject, record: JsonObject,
         file_bytes: int = 4 * 10**9, overwrite: bool = False) -> None:
    """Write tensors beside the small files of a model, whose config.json is told how they are `described`."""
    partial = to.with_name(f"{to.name}.partial")
    with export.nothing_left(partial):
        export.make_folder(partial)
        safetensors_files.write_folder(partial, shapes, kinds, computed, file_bytes)
        for path in published_files.small_files(folder):
            shutil.copyfile(path, partial / path.name)
        config = bounded_files.user_json(folder / FILE, dict, f"{folder}", "download it again") or {}
        atomic_files.write_json(partial / FILE, config | {"quantization_config": described})
        export.finish(partial, to, record, overwrite)


def packed(numbers: np.ndarray) -> np.ndarray:
    """Return numbers from -8 to 7 in words of 32 bits, the first in the lowest bits."""
    nibbles = (numbers.astype(np.int64) + 8).reshape(len(numbers), -1, WORDS) << (4 * np.arange(WORDS))
    return nibbles.sum(-1).astype(np.uint32).view(np.int32)


def _described(group: int) -> JsonObject:
    """Return what config.json says of the weights."""
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "ignore": ["lm_head"], "config_groups": {"group_0": {
                "targets": ["Linear"], "format": "pack-quantized", "input_activations": None,
                "output_activations": None,
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group,
                            "dynamic": False}}}}
