"""Merge models of one architecture tensor by tensor, into one folder in Hugging Face's format.

Tensors are read, merged in float32 and written one by one, so no whole model is in memory."""

import contextlib
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.errors import UserError, say
from jaxtrain.hub import export
from jaxtrain.hub.weights.safetensors_files import DTYPES, OTHERS, Tensor

METHODS = ("average", "slerp", "ties")
PARALLEL = 0.9995  # the cosine above which an arc is a straight line, and its formula divides by almost nothing


def merge(folders: Sequence[Path], to: Path, formula: Callable[[Sequence[np.ndarray]], np.ndarray], *,
          dtype: str | None = None, file_bytes: int = 4 * 10**9, record: JsonMapping | None = None,
          overwrite: bool = False) -> None:
    """Write what a formula makes of each tensor of some published folders, of which the first one gives the rest.

    Args:
        formula: takes a tensor of each folder, as it is in its file.
        dtype: of the weights; None: as in the first folder.
        record: what export.json says.
        overwrite: replace an earlier merged model in the folder.
    """
    from jaxtrain.hub.weights import rewritten_folder

    section, models = alike(folders)
    first = models[0]

    def merged(name):
        tensors = [model[name].view(DTYPES | OTHERS) for model in models]
        return formula(tensors) if first[name].dtype in DTYPES else tensors[0]

    rewritten_folder.write(folders[0], to, first, merged, section, {"merged": record or {}}, dtype, file_bytes,
                           overwrite=overwrite)


def alike(folders: Sequence[Path]) -> tuple[dict[str, Any], Sequence[Mapping[str, Tensor]]]:
    """Return the model section that some published folders have in common, and the tensors of each.

    Raises:
        UserError: they are of different architectures.
    """
    from jaxtrain.hf.hf_config import model_section
    from jaxtrain.hub.weights import safetensors_files

    sections = [model_section(folder) for folder in folders]
    models = [safetensors_files.tensors_of(folder) for folder in folders]
    for n in range(1, len(folders)):
        _refuse_other(folders[0], folders[n], [sections[0], sections[n]], [models[0], models[n]])
    return sections[0], models


# ------------------------------------------------------------------------------------------------------------- formulas

def average(tensors: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Return the weighted mean, of weights that add up to 1; of equal tensors it is the same, to the last bit."""
    first = _wide(tensors[0])
    merged = first.copy()
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        merged += weight * (_wide(tensor) - first)
    return merged


def slerp(tensors: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Return the point of the arc from one tensor to another, taken as vectors, at the second one's share of the angle.

    Vectors that are almost parallel, or opposite, have no arc between them that is well defined: they are averaged.
    """
    a, b = map(_wide, tensors)
    products = [float(np.vdot(x, y)) for x, y in ((a, b), (a, a), (b, b))]
    size = math.sqrt(products[1] * products[2])
    if not size or abs(cosine := products[0] / size) > PARALLEL:
        return average(tensors, weights)
    angle = math.acos(cosine)
    return (math.sin(weights[0] * angle) * a + math.sin(weights[1] * angle) * b) / math.sin(angle)


def ties(tensors: Sequence[np.ndarray], density: float, scale: float) -> np.ndarray:
    """Return the base, the last of the tensors, plus the changes of the others merged as TIES does (arXiv 2306.01708).

    Of each one's changes the largest are kept; each element gets the sign that has the larger sum, and the mean of the
    changes of this sign.
    """
    base = _wide(tensors[-1])
    ups, downs, up_counts, down_counts = (np.zeros_like(base) for _ in range(4))
    for tensor in tensors[:-1]:
        change = _largest(_wide(tensor) - base, density)
        ups += np.maximum(change, 0)
        downs += np.minimum(change, 0)
        up_counts += change > 0
        down_counts += change < 0
    rising, falling = ups > -downs, ups < -downs
    ups /= np.maximum(up_counts, 1)
    downs /= np.maximum(down_counts, 1)
    return base + scale * np.where(rising, ups, np.where(falling, downs, 0))


def _largest(change: np.ndarray, density: float) -> np.ndarray:
    """Return the share of the elements that is largest in magnitude, and zeros for the others."""
    kept = max(1, round(density * change.size))
    if kept >= change.size:
        return change
    sizes = np.abs(change)
    least = np.partition(sizes, change.size - kept, axis=None)[change.size - kept]
    return np.where(sizes >= least, change, 0)


def _wide(tensor: np.ndarray) -> np.ndarray:
    return tensor.astype(np.float64 if tensor.dtype == np.float64 else np.float32)


def published_folder(source: str, to: Path, opened: contextlib.ExitStack) -> Path:
    """Return a published folder: the source, or a temporary one with what a run has trained."""
    from jaxtrain.config.hub_names import model_folder
    from jaxtrain.hf.hf_config import FILE

    source = model_folder(source, "MODEL")
    if (Path(source) / FILE).is_file() and not (Path(source) / "checkpoints").is_dir():
        return Path(source)
    from jaxtrain.hub.initial_params import source_and_step  # imports JAX, which published folders do without

    try:
        folder, step = source_and_step(source)
    except UserError as error:
        raise UserError("MODEL", error.reason, error.fix) from None
    if not (folder / "checkpoints").is_dir():
        raise UserError("MODEL", f"{folder} is neither a published folder nor the workdir of a run",
                        "give one of these")
    partial = to.with_name(f"{to.name}.partial")
    opened.enter_context(export.nothing_left(partial))
    export.make_folder(partial)  # and with it what the temporary folder is in
    made = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix=f"{to.name}.", dir=to.absolute().parent)))
    export.export(folder, made / "out", step, dtype="float32")
    return made / "out"


def _refuse_other(first: Path, other: Path, sections: Sequence[JsonMapping],
                  models: Sequence[Mapping[str, Tensor]]) -> None:
    """Refuse a model of another architecture than the first one's, by the first difference."""
    fix = "give models of one architecture"
    for folder, model in zip((first, other), models, strict=True):
        if packed := next((name for name in model if name.endswith("_blocks")), ""):
            raise UserError("MODEL", f"{folder} has {packed} in MXFP4, which cannot be merged",
                            "give folders in bfloat16, such as jaxtrain export writes")
    for key in [*sections[0], *sections[1]]:
        mine, theirs = (section.get(key) for section in sections)
        if mine != theirs:
            raise UserError("MODEL", f"{other} has model.{key}={theirs}, and {first} has {mine}", fix)
    for name in [*models[0], *models[1]]:
        mine, theirs = (f"of the shape {list(model[name].shape)}" if name in model else "missing" for model in models)
        if mine != theirs:
            raise UserError("MODEL", f"tensor {name} is {theirs} in {other} and {mine} in {first}", fix)
        a, b = (model[name] for model in models)
        if a.dtype not in DTYPES and (a.dtype != b.dtype or not np.array_equal(
                a.view(DTYPES | OTHERS), b.view(DTYPES | OTHERS))):
            raise UserError("MODEL", f"tensor {name}, of dtype {a.dtype}, is not the same in {other} and in {first}, "
                            "and cannot be merged", fix)
    tokenizers = [path.read_bytes() if (path := folder / "tokenizer.json").is_file() else b""
                  for folder in (first, other)]
    if tokenizers[0] != tokenizers[1]:
        say(f"{other} has another tokenizer.json than {first}, which the merged model gets")
