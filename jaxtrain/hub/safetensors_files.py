"""Read and write safetensors files: a length of 8 bytes, a header of JSON, and the tensors' bytes without holes.

Tensors are views of the mapped file, so that whoever takes a slice reads that slice only; writing takes tensors one by
one. The format is described at https://huggingface.co/docs/safetensors.
"""

import json
import math
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files, bounded_files, safe_names

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_BYTES = {"U8": np.uint8}  # of which weights in few bits are made
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_FORM = {str: {"dtype": str, "shape": [int], "data_offsets": (int, int)}}
_HEADER = 100 * 10**6  # bytes: the format's own limit


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file, of which nothing is read yet."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # in the file

    def view(self) -> np.ndarray:
        """Return the mapped tensor; raises UserError for a dtype that weights do not have."""
        if self.dtype not in DTYPES:
            raise UserError(f"{self.file}", f"tensor {self.name} is of dtype {self.dtype}",
                            f"give weights in {', '.join(DTYPES)}")
        return self._mapped(np.dtype(DTYPES[self.dtype]))

    def octets(self) -> np.ndarray:
        """Return the mapped tensor, which is one of bytes."""
        return self._mapped(np.dtype(_BYTES[self.dtype]))

    def _mapped(self, kind: np.dtype) -> np.ndarray:
        count = math.prod(self.shape)
        if not count:
            return np.empty(self.shape, kind)
        mapped = np.memmap(self.file, np.uint8, "r", self.offset, (count * kind.itemsize,))
        return mapped.view(kind).reshape(self.shape)


def tensors_of(folder: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a folder by name, of one file or of those that its index lists."""
    folder = Path(folder)
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise UserError(f"{folder}", f"it has neither {SINGLE} nor {INDEX}",
                            "give a folder in Hugging Face's format with safetensors weights")
        return _header(folder / SINGLE)
    try:
        listed = bounded_files.parsed(bounded_files.read(folder / INDEX), {"weight_map": {str: str}})["weight_map"]
        files = {name: safe_names.linked(folder, name) for name in sorted(set(listed.values()))}
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / INDEX}", f"it cannot be read ({error})", "download it again") from None
    found: dict[str, Tensor] = {}
    for name, file in files.items():
        for tensor in _header(file).values():
            if listed.get(tensor.name) != name:
                raise UserError(f"{file}", f"{INDEX} does not list its tensor {tensor.name}, or in another file",
                                "download the folder again")
            found[tensor.name] = tensor
    if missing := sorted(listed.keys() - found.keys()):
        raise UserError(f"{folder / INDEX}", f"it lists {missing[0]}, which {listed[missing[0]]} does not have",
                        "download the folder again")
    return found


def _header(file: Path) -> dict[str, Tensor]:
    """Return the tensors that a file's header describes, once its size and offsets are those that it says."""
    try:
        with bounded_files.opened(file) as opened:
            size, length = os.fstat(opened.fileno()).st_size, int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes does not fit into {size} bytes")
            header = bounded_files.parsed(opened.read(length))
        header.pop("__metadata__", None)
        if wrong := bounded_files.misfit(header, _FORM):
            raise ValueError(wrong)
        _check_offsets(header, size - 8 - length)
    except FileNotFoundError:
        raise UserError(f"{file}", "it is not there", "download the folder again") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}", f"it is not a whole safetensors file ({error})", "download it again") from None
    return {name: Tensor(file, name, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            for name, entry in header.items()}


def _check_offsets(header: Mapping[str, Any], size: int) -> None:
    """Refuse tensors that overlap, leave holes, end elsewhere than the file, or have another size than their shape."""
    at = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != at or end < at:
            raise ValueError(f"tensor {name} does not begin at byte {at}, where the one before it ends")
        if any(n < 0 for n in entry["shape"]):
            raise ValueError(f"tensor {name} has a negative size")
        kind = (DTYPES | _BYTES).get(entry["dtype"])
        if kind and end - begin != math.prod(entry["shape"]) * np.dtype(kind).itemsize:
            raise ValueError(f"tensor {name} has {end - begin} bytes, which is not its shape in {entry['dtype']}")
        at = end
    if at != size:
        raise ValueError(f"its tensors end at byte {at} of {size}")


def split_over_files(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Return the names of the tensors of each file, in order; a file of several has at most `limit` bytes."""
    files: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if files[-1] and held + size > limit:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    return files


def file_names(count: int) -> list[str]:
    """Return what so many files are called."""
    return [SINGLE] if count == 1 else [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]


def write(path: Path, shapes: Mapping[str, Sequence[int]], dtype: Any, tensors: Iterator[np.ndarray],
          float32: Container[str] = ()) -> None:
    """Write one file: the header, which the shapes determine, then each tensor as it comes, in the same order.

    `float32`: the names of tensors that are written in float32 rather than in `dtype`.
    """
    kinds, at = {name: np.dtype(np.float32 if name in float32 else dtype) for name in shapes}, 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.items():
        end = at + math.prod(shape) * kinds[name].itemsize
        header[name] = {"dtype": _NAMES[kinds[name]], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_files.written(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            assert tensor.shape == tuple(shape), (name, tensor.shape, shape)
            file.write(np.ascontiguousarray(tensor, kinds[name]).view(np.uint8).reshape(-1).data)


def write_index(folder: Path, files: Mapping[str, str], size: int) -> None:
    """Write which file each tensor is in."""
    atomic_files.write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(files)})
