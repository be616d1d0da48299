"""Merge models of one architecture into one folder in Hugging Face's format.

    jaxtrain merge SOURCE SOURCE --output=FOLDER
    jaxtrain merge SOURCE SOURCE --output=FOLDER --method=slerp --weights=0.7,0.3
    jaxtrain merge SOURCE SOURCE --output=FOLDER --method=ties --base=SOURCE --density=0.2

A source is a folder in Hugging Face's format, hf:ORG/NAME on the Hugging Face Hub, or WORKDIR[@STEP] of a run, which is
exported first. Tensors are read, merged in float32 and written one by one, so no whole model is in memory. config.json,
tokenizer and chat template come from the first source.
"""

import argparse
import contextlib
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxtrain.base.annotations import JsonMapping
from jaxtrain.errors import UserError, say
from jaxtrain.flags import command, parser_of
from jaxtrain.hub import export
from jaxtrain.hub.weights.safetensors_files import DTYPES, OTHERS, Tensor

METHODS = ("average", "slerp", "ties")
PARALLEL = 0.9995  # the cosine above which an arc is a straight line, and its formula divides by almost nothing


@command()
def main(argv: list[str] | None = None) -> None:
    """Parse the flags and merge."""
    parser = parser_of("merge", __doc__)
    parser.add_argument("sources", nargs="+", metavar="SOURCE",
                        help="a folder in Hugging Face's format, hf:ORG/NAME on the Hugging Face Hub, or "
                             "WORKDIR[@STEP]")
    parser.add_argument("--output", dest="to", required=True, metavar="FOLDER", help="a new folder for the model")
    parser.add_argument("--method", choices=METHODS, default="average", help="default: average")
    parser.add_argument("--weights", help="weight of each source, for average and slerp; default: all equal")
    parser.add_argument("--base", metavar="SOURCE", help="for ties: the model that the sources were tuned from")
    parser.add_argument("--density", type=float, help="for ties: the share of each tensor's changes to keep, those of "
                                                      "largest magnitude; default: 0.2")
    parser.add_argument("--scale", type=float, help="for ties: the factor of the merged changes; default: 1")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"),
                        help="dtype of the weights; default: as in the first source")
    parser.add_argument("--file_gb", type=float, default=4.0, help="maximum size of a weights file, in 10^9 bytes")
    flags = parser.parse_args(argv)
    _check(flags)
    to = Path(flags.to)
    export.check_is_new(to)
    with contextlib.ExitStack() as opened:
        folders = [_folder(source, to, opened) for source in [*flags.sources, *([flags.base] if flags.base else [])]]
        merge(folders, to, _formula(flags), dtype=flags.dtype, file_bytes=int(flags.file_gb * 1e9), record={
            "sources": flags.sources, **{key: getattr(flags, key) for key in (
                "method", "weights", "base", "density", "scale") if getattr(flags, key) is not None}})
    say(f"{to} has the {flags.method} of {len(flags.sources)} models")


def merge(folders: Sequence[Path], to: Path, formula: Callable[[Sequence[np.ndarray]], np.ndarray], *,
          dtype: str | None = None, file_bytes: int = 4 * 10**9, record: JsonMapping | None = None) -> None:
    """Write what a formula makes of each tensor of some published folders, of which the first one gives the rest.

    Args:
        formula: takes a tensor of each folder, as it is in its file.
        dtype: of the weights; None: as in the first folder.
        record: what export.json says.
    """
    from jaxtrain.hf.hf_config import model_section
    from jaxtrain.hub.weights import rewritten_folder, safetensors_files

    sections = [model_section(folder) for folder in folders]
    models = [safetensors_files.tensors_of(folder) for folder in folders]
    for n in range(1, len(folders)):
        _refuse_other(folders[0], folders[n], [sections[0], sections[n]], [models[0], models[n]])
    first = models[0]

    def merged(name):
        tensors = [model[name].view(DTYPES | OTHERS) for model in models]
        return formula(tensors) if first[name].dtype in DTYPES else tensors[0]

    rewritten_folder.write(folders[0], to, first, merged, sections[0], {"merged": record or {}}, dtype, file_bytes)


# ----------------------------------------------------------------------------------------------------------- formulas

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


def _formula(flags: argparse.Namespace) -> Callable[[Sequence[np.ndarray]], np.ndarray]:
    """Return the formula that the flags ask for."""
    if flags.method == "ties":
        density, scale = (default if given is None else given
                          for given, default in ((flags.density, 0.2), (flags.scale, 1.0)))
        return lambda tensors: ties(tensors, density, scale)
    weights = _weights(flags)
    method = average if flags.method == "average" else slerp
    return lambda tensors: method(tensors, weights)


# ------------------------------------------------------------------------------------------------------------- checks

def _check(flags: argparse.Namespace) -> None:
    """Refuse flags that do not go together."""
    if len(flags.sources) < 2:
        raise UserError("SOURCE", "one model has nothing to be merged with", "give two or more")
    if flags.method == "slerp" and len(flags.sources) != 2:
        raise UserError("SOURCE", f"--method=slerp is for two models, and {len(flags.sources)} are given",
                        "use --method=average")
    for key in ("base", "density", "scale"):
        if flags.method != "ties" and getattr(flags, key) is not None:
            raise UserError(f"--{key}", f"--method={flags.method} does not read it", "leave it out, or use ties")
    if flags.method == "ties":
        if not flags.base:
            raise UserError("--base", "ties merges changes, and needs the model that was changed",
                            "name the model that the sources were tuned from")
        if flags.weights:
            raise UserError("--weights", "method=ties weights all sources equally", "leave it out, or use average")
        if flags.density is not None and not 0 < flags.density <= 1:
            raise UserError("--density", f"{flags.density} is not in (0, 1]", "try 0.2")
        if flags.scale is not None and not math.isfinite(flags.scale):
            raise UserError("--scale", f"{flags.scale} is not finite", "try 1")
    if not 0 <= flags.file_gb < 1e6:
        raise UserError("--file_gb", f"{flags.file_gb} is not the size of a file", "give one such as 4")
    _weights(flags)


def _weights(flags: argparse.Namespace) -> list[float]:
    """Return the weights of the sources, which add up to 1."""
    words = flags.weights.split(",") if flags.weights else ["1"] * len(flags.sources)
    try:
        given = [float(word) for word in words]
    except ValueError:
        given = [math.nan]
    if not all(0 <= weight < math.inf for weight in given) or not sum(given):
        raise UserError("--weights", f"{flags.weights!r} have to be numbers of 0 or more, and not all 0",
                        "write them as 0.7,0.3")
    if len(given) != len(flags.sources):
        raise UserError("--weights", f"there are {len(given)} for {len(flags.sources)} sources", "give one for each")
    return [weight / sum(given) for weight in given]


def _folder(source: str, to: Path, opened: contextlib.ExitStack) -> Path:
    """Return a published folder: the source, or a temporary one with what a run has trained."""
    from jaxtrain.config.hub_names import model_folder
    from jaxtrain.hf.hf_config import FILE

    source = model_folder(source, "SOURCE")
    if (Path(source) / FILE).is_file() and not (Path(source) / "checkpoints").is_dir():
        return Path(source)
    from jaxtrain.hub.initial_params import source_and_step  # imports JAX, which published folders do without

    try:
        folder, step = source_and_step(source)
    except UserError as error:
        raise UserError("SOURCE", error.reason, error.fix) from None
    if not (folder / "checkpoints").is_dir():
        raise UserError("SOURCE", f"{folder} is neither a published folder nor the workdir of a run",
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
            raise UserError("SOURCE", f"{folder} has {packed} in MXFP4, which cannot be merged",
                            "give folders in bfloat16, such as jaxtrain export writes")
    for key in [*sections[0], *sections[1]]:
        mine, theirs = (section.get(key) for section in sections)
        if mine != theirs:
            raise UserError("SOURCE", f"{other} has model.{key}={theirs}, and {first} has {mine}", fix)
    for name in [*models[0], *models[1]]:
        mine, theirs = (f"of the shape {list(model[name].shape)}" if name in model else "missing" for model in models)
        if mine != theirs:
            raise UserError("SOURCE", f"tensor {name} is {theirs} in {other} and {mine} in {first}", fix)
        a, b = (model[name] for model in models)
        if a.dtype not in DTYPES and (a.dtype != b.dtype or not np.array_equal(
                a.view(DTYPES | OTHERS), b.view(DTYPES | OTHERS))):
            raise UserError("SOURCE", f"tensor {name}, of dtype {a.dtype}, is not the same in {other} and in {first}, "
                            "and cannot be merged", fix)
    tokenizers = [path.read_bytes() if (path := folder / "tokenizer.json").is_file() else b""
                  for folder in (first, other)]
    if tokenizers[0] != tokenizers[1]:
        say(f"{other} has another tokenizer.json than {first}, which the merged model gets")


if __name__ == "__main__":
    raise SystemExit(main())
