"""Write a published folder like another one, with tensors that are computed one at a time."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.config.family import config_of, entries
from jaxtrain.files import atomic_files, bounded_files
from jaxtrain.hf.hf_config import FILE
from jaxtrain.hub import export
from jaxtrain.hub.folders import published_files
from jaxtrain.hub.release import exported_config, model_card
from jaxtrain.hub.weights import safetensors_files
from jaxtrain.hub.weights.safetensors_files import DTYPES, OTHERS, Tensor

_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def write(like: Path, to: Path, tensors: Mapping[str, Tensor], computed: Callable[[str], np.ndarray],
          model: JsonMapping, record: JsonMapping, dtype: str | None = None,
          file_bytes: int = 4 * 10**9, sources: Sequence[str] = (), overwrite: bool = False) -> None:
    """Write the folder `to`, which appears when it is whole.

    Args:
        like: the folder whose config.json, tokenizer and chat template are copied.
        to: the folder to make.
        tensors: which ones there are, of which shapes and dtypes.
        computed: returns a tensor by its name.
        model: the `model` section that the config amounts to.
        record: what export.json says beside the SHA-256 of every file.
        dtype: of the weights; None: each one's own. Those that are float32 in any model of the family stay so.
        file_bytes: the most that a file of several tensors has.
        sources: the names of the published models that it is made of, for its card.
        overwrite: replace an earlier one.
    """
    export.check_is_new(to, overwrite)
    partial = to.with_name(f"{to.name}.partial")
    float32 = {entry.theirs.rpartition(".")[2] for entry in entries(config_of(model)) if entry.float32}
    with export.nothing_left(partial):
        export.make_folder(partial)
        safetensors_files.write_folder(
            partial, {name: tensor.shape for name, tensor in tensors.items()},
            {name: _kind(name, tensor, dtype, float32) for name, tensor in tensors.items()}, computed, file_bytes)
        for path in published_files.small_files(like):
            shutil.copyfile(path, partial / path.name)
        for path in like.glob("tokenizer_record.json"):  # of a kind that only jaxtrain has
            shutil.copyfile(path, partial / path.name)
        if dtype:
            config = bounded_files.user_json(like / FILE, dict, f"{like}", "download it again") or {}
            atomic_files.write_json(partial / FILE, exported_config.of_dtype(config, dtype))
        atomic_files.write(partial / model_card.FILE, model_card.derived_card(to.name, record, sources))
        export.finish(partial, to, record, overwrite)


def _kind(name: str, tensor: Tensor, dtype: str | None, float32: set[str]) -> np.dtype:
    """Return the dtype in which a tensor is written."""
    changed = dtype and tensor.dtype in DTYPES and name.rpartition(".")[2] not in float32
    return np.dtype(_DTYPES[dtype] if dtype and changed else (DTYPES | OTHERS)[tensor.dtype])
