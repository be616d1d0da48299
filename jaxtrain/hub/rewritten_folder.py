"""Write a published folder like another one, with tensors that are computed one at a time."""

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.published_config import FILE
from jaxtrain.files import atomic_files, bounded_files
from jaxtrain.hub import export, safetensors_files
from jaxtrain.hub.release.model_card import FILE as CARD
from jaxtrain.hub.safetensors_files import INDEX, Tensor


def write(like: Path, to: Path, tensors: Mapping[str, Tensor], computed: Callable[[str], np.ndarray], dtype: str,
          record: Mapping[str, Any], file_bytes: int = 4 * 10**9) -> None:
    """Write the folder `to`, which appears when it is whole.

    Args:
        like: the folder whose config.json, tokenizer and other small files are copied, but not its card.
        to: the folder to make.
        tensors: which tensors there are; those in float32 that are no weights, such as a router's bias, stay in it.
        computed: returns a tensor by name.
        dtype: of the other tensors, such as "bfloat16".
        record: what export.json says beside the SHA-256 of every file.
        file_bytes: the most that a file of several tensors has.
    """
    export.check_is_new(to)
    partial = to.with_name(f"{to.name}.partial")
    export.make_folder(partial)
    for file in like.iterdir():
        if file.is_file() and file.name not in (FILE, export.RECORD, INDEX, CARD) and file.suffix != ".safetensors":
            shutil.copyfile(file, partial / file.name)
    kinds = {name: np.dtype(dtype if tensor.dtype != "F32" or name.endswith("weight") else np.float32)
             for name, tensor in tensors.items()}
    sizes = {name: math.prod(tensor.shape) * kinds[name].itemsize for name, tensor in tensors.items()}
    files = safetensors_files.split_over_files(sizes, file_bytes)
    called = safetensors_files.file_names(len(files))
    for file, names in zip(called, files, strict=True):
        safetensors_files.write(partial / file, {name: tensors[name].shape for name in names}, np.dtype(dtype),
                                map(computed, names), {name for name in names if kinds[name] == np.float32})
    if len(files) > 1:
        safetensors_files.write_index(partial, {name: file for file, names in zip(called, files, strict=True)
                                                for name in names}, sum(sizes.values()))
    config = bounded_files.user_json(like / FILE, dict, f"{like}", "download it again") or {}
    atomic_files.write_json(partial / FILE, config | {"dtype": dtype})
    export.finish(partial, to, record)
