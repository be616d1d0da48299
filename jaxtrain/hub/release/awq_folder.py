"""A published folder whose linear layers are in 4 bits in AWQ's own format ("gemm"), which servers have kernels for.

Beside each `qweight`, eight outputs in an int32, lie the `qzeros` of groups of inputs, packed alike, and their `scales`
in float16; matrices are [in, out]. Embeddings, norms and the head stay, but for the scales that norms take in.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.errors import UserError
from jaxtrain.files import bounded_files
from jaxtrain.hf.hf_config import FILE
from jaxtrain.hub import export
from jaxtrain.hub.release import awq, int4_folder
from jaxtrain.hub.weights import safetensors_files

KINDS = ("llama", "mistral", "qwen2", "qwen3")  # norms that multiply by their weight, right before what reads them
PARTS = ("qweight", "qzeros", "scales")


def write(folder: Path, to: Path, group: int, moments: Mapping[str, np.ndarray], overwrite: bool = False) -> JsonObject:
    """Write a folder in AWQ's format, which appears when it is whole; return what its export.json says.

    Args:
        folder: the published model.
        to: the folder to make.
        group: how many inputs share a scale.
        moments: of the inputs of layers, by the names of tensors (calibration.py).
        overwrite: replace an earlier one.
    """
    export.check_is_new(to, overwrite)
    kind = (bounded_files.user_json(folder / FILE, dict, f"{folder}", "download it again") or {}).get("model_type")
    if kind not in KINDS:
        raise UserError("--format", f"awq does not know what scales the inputs of layers of {kind}",
                        f"use int4, or a model of {', '.join(KINDS)}")
    tensors = safetensors_files.tensors_of(folder)
    narrow = int4_folder.narrow_layers(folder, tensors, group)
    if wrong := [name for name in narrow if tensors[name].shape[0] % len(awq.WORD)]:
        out = tensors[wrong[0]].shape[0]
        raise UserError("--format", f"{wrong[0]} has {out} outputs, no multiple of 8", "use int4")
    shapes: dict[str, tuple[int, ...]] = {}
    kinds: dict[str, np.dtype] = {}
    for name, tensor in tensors.items():
        if name not in narrow:
            shapes[name], kinds[name] = tensor.shape, int4_folder.dtype_of(tensor)
            continue
        out, inputs = tensor.shape
        for part, shape, dtype in zip(PARTS, ((inputs, out // 8), (inputs // group, out // 8), (inputs // group, out)),
                                      (np.int32, np.int32, np.float16), strict=True):
            shapes[_part(name, part)], kinds[_part(name, part)] = shape, np.dtype(dtype)
    scaled = Scaled(tensors, group, moments)
    made: dict[str, np.ndarray] = {}

    def computed(name: str) -> np.ndarray:
        of, _, part = name.rpartition(".")
        if name in tensors:
            return scaled.matrix(name)
        if part == PARTS[0]:
            made.clear()
            numbers, zeros, scales = awq.rounded(scaled.matrix(f"{of}.weight"), group)
            made.update(zip(PARTS, (awq.packed(numbers.T), awq.packed(zeros.T), scales.T), strict=True))
        return made[part]

    record = {"source": folder.resolve().name, "format": "awq", "group": group, "rounding": "awq"}
    described = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": True,
                 "modules_to_not_convert": ["lm_head"]}
    int4_folder.save(folder, to, shapes, kinds, computed, described, record, overwrite=overwrite)
    return record


def _part(name: str, part: str) -> str:
    return f"{name.removesuffix('weight')}{part}"


class Scaled:
    """The tensors of a model with the scales of inputs in the layers that read them, and out of what is before."""

    def __init__(self, tensors: Mapping[str, safetensors_files.Tensor], group: int, moments: Mapping[str, np.ndarray]):
        self._tensors, self._group, self._moments = tensors, group, moments
        self._scales: dict[str, np.ndarray] = {}

    def matrix(self, name: str) -> np.ndarray:
        """Return a tensor of the model: the product of all of them is unchanged."""
        x = self._tensors[name].view()
        layer, _, place = name.removesuffix(".weight").partition(".layers.")
        number, _, place = place.partition(".")
        if not place or not name.endswith(".weight"):
            return x
        layer = f"{layer}.layers.{number}"
        before = next((one for one, readers in awq.READERS.items() if place in readers), "")
        if not before and place not in awq.READERS:
            return x
        wide = x.astype(np.float32)
        if before:
            wide = wide * self._of(layer, before)
        if place in awq.READERS:
            wide = (wide.T / self._of(layer, place)).T
        return wide if x.ndim > 1 else wide.astype(x.dtype)

    def _of(self, layer: str, before: str) -> np.ndarray:
        """Return the scales of what lies behind a norm or a layer, as they are once the norm has them."""
        key = f"{layer}.{before}"
        if key not in self._scales:
            weight = self._tensors[f"{key}.weight"].view()
            readers = [f"{layer}.{one}.weight" for one in awq.READERS[before]]
            matrices = [self._tensors[one].view() for one in readers]
            if len(weight) != matrices[0].shape[1] or f"{key}.bias" in self._tensors:
                found = np.ones(1, np.float32)  # each value is read by several heads, or has a bias besides
            else:
                found = awq.input_scales(matrices, self._group, self._moments[readers[0]])
            if weight.ndim == 1:  # the norm's own dtype rounds: what it divides by in fact is the scale
                wide = weight.astype(np.float32)
                kept = (wide / found).astype(weight.dtype).astype(np.float32)
                found = np.where(kept == 0, 1, np.divide(wide, kept, out=np.ones_like(wide), where=kept != 0))
            self._scales[key] = found
        return self._scales[key]
