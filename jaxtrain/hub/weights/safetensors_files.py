"""Read and write safetensors files: a length of 8 bytes, a header of JSON, and the tensors' bytes without holes.

Tensors are views of the mapped file, so that whoever takes a slice reads that slice only; writing takes tensors one by
one. The format is described at https://huggingface.co/docs/safetensors.
"""

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from jaxtrain.base.annotations import Json, JsonMapping, JsonObject
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files, bounded_files, safe_names
from jaxtrain.files.work_progress import Work

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
# Of what is not weights, such as buffers, and of weights in few bits.
OTHERS = {"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_}
_NAMES = {np.dtype(dtype): name for name, dtype in (DTYPES | OTHERS).items()}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
APART = "frozen"  # begins the names of files of what does not change
_FORM = {"dtype": str, "shape": [int], "data_offsets": (int, int)}
# What no model comes near to, and what takes a moment and little memory to read:
_HEADER = 2**25  # bytes of a header, or of an index; the format's own limit, 10^8, takes gigabytes in Python
_TENSORS = 2**18  # tensors of a file
_LISTED = 2**20  # tensors of an index
_RANK = 32  # dimensions of a tensor


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file, of which nothing is read yet."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # in the file

    def view(self, known: Mapping[str, DTypeLike] = MappingProxyType(DTYPES)) -> np.ndarray:
        """Return the mapped tensor; raises UserError for a dtype that is not among the known ones."""
        kind, count = self._kind(known), math.prod(self.shape)
        if not count:
            return np.empty(self.shape, kind)
        mapped = np.memmap(self.file, np.uint8, "r", self.offset, (count * kind.itemsize,))
        return mapped.view(kind).reshape(self.shape)

    def part(self, first: int, shape: tuple[int, ...]) -> "Tensor":
        """Return the tensor of this shape that lies in this one, from its number `first` on."""
        return replace(self, shape=shape, offset=self.offset + first * self._kind(DTYPES).itemsize)

    def _kind(self, known: Mapping[str, DTypeLike]) -> np.dtype:
        if self.dtype not in known:
            raise UserError(f"{self.file}", f"tensor {self.name} is of dtype {self.dtype}",
                            f"give weights in {', '.join(DTYPES)}")
        return np.dtype(known[self.dtype])


def tensors_of(folder: str | Path, single: str = SINGLE) -> dict[str, Tensor]:
    """Return the tensors of a folder by name, of one file or of those that its index lists."""
    folder = Path(folder)
    if not (folder / INDEX).is_file() or single != SINGLE:
        if not (folder / single).is_file():
            raise UserError(f"{folder}", f"it has neither {single} nor {INDEX}" if single == SINGLE else
                            f"it has no {single}", "give a folder in Hugging Face's format with safetensors weights")
        return _header(folder / single)
    try:
        content = bounded_files.read(folder / INDEX, _HEADER)
        if content.count(b":") > _LISTED:
            raise ValueError(f"it lists more than {_LISTED:,} tensors")
        listed = bounded_files.parsed(content, {"weight_map": {str: str}}, pairs=_each_once)["weight_map"]
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
            if not 2 <= length <= size - 8:
                raise ValueError(f"a header of {length} bytes does not fit into {size} bytes")
            if length > _HEADER:
                raise ValueError(f"a header of {length:,} bytes is larger than {_HEADER:,}, the most that is read")
            header = _parsed(opened.read(length))
        _check_offsets(header, size - 8 - length)
    except FileNotFoundError:
        raise UserError(f"{file}", "it is not there", "download the folder again") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}", f"it is not a whole safetensors file ({error})", "download it again") from None
    return {name: Tensor(file, name, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            for name, entry in header.items()}


def _each_once(pairs: list[tuple[str, Json]]) -> JsonObject:
    """Return an object, of which no key is there more than once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"is not valid: it has {twice[:100]!r} more than once")
    return found


def _parsed(content: bytes) -> JsonObject:
    """Return the entries of a header's tensors, by name; what is too much is refused before it is parsed."""
    if content.count(b"{") > _TENSORS + 2 or content.count(b"[") > 2 * _TENSORS:
        raise ValueError(f"its header describes more than {_TENSORS:,} tensors")
    header = bounded_files.parsed(content, pairs=_each_once)
    about = header.pop("__metadata__", None)
    if about is not None and (wrong := bounded_files.misfit(about, {str: str}, "__metadata__")):
        raise ValueError(wrong)
    for name, entry in header.items():
        if not _is_sound(entry):
            shape = entry.get("shape") if isinstance(entry, dict) else None
            too_many = isinstance(shape, list) and len(shape) > _RANK
            wrong = f"tensor {name} has more than {_RANK} dimensions" if too_many else bounded_files.misfit(
                entry, _FORM, name) or f"tensor {name} has a size or an offset that no file has"
            raise ValueError(wrong)
    return header


def _is_sound(entry: Json) -> bool:
    """Return whether a tensor is described as it should be; quick, since a header may have very many."""
    if type(entry) is not dict or type(entry.get("dtype")) is not str:
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    return (type(shape) is list and type(offsets) is list and len(shape) <= _RANK and len(offsets) == 2
            and all(type(n) is int and 0 <= n < 2**63 for n in (*shape, *offsets)))


def _check_offsets(header: JsonMapping, size: int) -> None:
    """Refuse tensors that overlap, leave holes, end elsewhere than the file, or have another size than their shape."""
    at = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != at or end < at:
            raise ValueError(f"tensor {name} does not begin at byte {at}, where the one before it ends")
        kind = (DTYPES | OTHERS).get(entry["dtype"])
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


def file_names(count: int, stem: str = "model") -> list[str]:
    """Return what so many files are called."""
    return [f"{stem}.safetensors"] if count == 1 else [
        f"{stem}-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]


def write_folder(folder: Path, shapes: Mapping[str, Sequence[int]], kinds: Mapping[str, np.dtype],
                 tensor: Callable[[str], np.ndarray], limit: int, share: tuple[int, int] = (0, 1),
                 apart: Collection[str] = (), there: bool = False) -> list[str]:
    """Write tensors into files of at most `limit` bytes each, and their index; return the files' names.

    Args:
        kinds: their dtypes.
        tensor: makes one, from its name; it is called for all tensors that are written, in order.
        share: (n, of how many): write only each so-manieth file, as one of several processes.
        apart: tensors that have files of their own, whose names begin with `APART`.
        there: the folder has these files already; they are listed, and not written.
    """
    sizes = {name: math.prod(shape) * kinds[name].itemsize for name, shape in shapes.items()}
    groups = {stem: split_over_files(inside, limit) for stem, inside in (
        (APART, {name: size for name, size in sizes.items() if name in apart}),
        ("model", {name: size for name, size in sizes.items() if name not in apart})) if inside}
    whole = [(called, inside) for stem, files in groups.items()
             for called, inside in zip(file_names(len(files), stem), files, strict=True)]
    written = [(called, inside) for called, inside in whole if not (there and inside[0] in apart)]
    total = sum(sizes[name] for _, inside in written for name in inside)
    with Work("writing weights", total, quiet=share[0] != 0) as work:
        def made(name: str) -> np.ndarray:
            work.add(sizes[name])
            return tensor(name)

        for n, (file, inside) in enumerate(written):
            tensors = map(made, inside)
            if n % share[1] == share[0]:
                write(folder / file, {name: shapes[name] for name in inside}, kinds, tensors)
            else:  # making them may need all processes together
                for _ in tensors:
                    pass
    if len(whole) > 1 and share[0] == 0:
        atomic_files.write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": {
            name: file for file, inside in whole for name in inside}})
    return [file for file, _ in whole]


def write(path: Path, shapes: Mapping[str, Sequence[int]], kinds: Mapping[str, DTypeLike | None],
          tensors: Iterator[np.ndarray]) -> None:
    """Write one file: the header, which shapes and dtypes determine, then each tensor as it comes, in the same order.
    """
    kinds, at = {name: np.dtype(kinds[name]) for name in shapes}, 0
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
