"""Merge models of one architecture into one folder in Hugging Face's format.

    jaxtrain merge MODEL MODEL --output=FOLDER
    jaxtrain merge MODEL MODEL --output=FOLDER --method=slerp --weights=0.7,0.3
    jaxtrain merge MODEL MODEL --output=FOLDER --method=ties --base=MODEL --density=0.2

A model is a folder in Hugging Face's format, hf:ORG/NAME on the Hugging Face Hub, or WORKDIR[@STEP] of a run, which is
exported first. Tensors are read, merged in float32 and written one by one, so no whole model is in memory. config.json,
tokenizer and chat template come from the first source.
"""

import argparse
import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxtrain.commands.flags import add_dry_run, add_overwrite, command, parser_of
from jaxtrain.errors import UserError, say, tell
from jaxtrain.hub import export
from jaxtrain.hub.merge import METHODS, alike, average, merge, published_folder, slerp, ties


@command()
def main(argv: list[str] | None = None) -> None:
    """Parse the flags and merge."""
    parser = parser_of("merge", __doc__)
    parser.add_argument("sources", nargs="+", metavar="MODEL",
                        help="a folder in Hugging Face's format, hf:ORG/NAME on the Hugging Face Hub, or "
                             "WORKDIR[@STEP]")
    parser.add_argument("--output", dest="to", required=True, metavar="FOLDER", help="a new folder for the model")
    add_overwrite(parser, "an earlier merged or exported model in that folder")
    add_dry_run(parser, "check that the models can be merged, say what would be written, and stop")
    parser.add_argument("--method", choices=METHODS, default="average", help="default: average")
    parser.add_argument("--weights", help="weight of each source, for average and slerp; default: all equal")
    parser.add_argument("--base", metavar="MODEL", help="for ties: the model that the sources were tuned from")
    parser.add_argument("--density", type=float, help="for ties: the share of each tensor's changes to keep, those of "
                                                      "largest magnitude; default: 0.2")
    parser.add_argument("--scale", type=float, help="for ties: the factor of the merged changes; default: 1")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"),
                        help="dtype of the weights; default: as in the first source")
    parser.add_argument("--file_gb", type=float, default=4.0, help="maximum size of a weights file, in 10^9 bytes")
    flags = parser.parse_args(argv)
    _check(flags)
    to = Path(flags.to)
    export.check_is_new(to, flags.overwrite)
    with contextlib.ExitStack() as opened:
        folders = [published_folder(source, to, opened)
                   for source in [*flags.sources, *([flags.base] if flags.base else [])]]
        if flags.dry_run:
            _, models = alike(folders)
            count = sum(math.prod(tensor.shape) for tensor in models[0].values())
            tell(f"the {flags.method} of {len(flags.sources)} models would be written to {to}: "
                 f"{len(models[0]):,} tensors, {count:,} parameters")
            return
        merge(folders, to, _formula(flags), dtype=flags.dtype, file_bytes=int(flags.file_gb * 1e9),
              overwrite=flags.overwrite, record={
            "sources": flags.sources, **{key: getattr(flags, key) for key in (
                "method", "weights", "base", "density", "scale") if getattr(flags, key) is not None}})
    say(f"{to} has the {flags.method} of {len(flags.sources)} models")


def _formula(flags: argparse.Namespace) -> Callable[[Sequence[np.ndarray]], np.ndarray]:
    """Return the formula that the flags ask for."""
    if flags.method == "ties":
        density, scale = (default if given is None else given
                          for given, default in ((flags.density, 0.2), (flags.scale, 1.0)))
        return lambda tensors: ties(tensors, density, scale)
    weights = _weights(flags)
    method = average if flags.method == "average" else slerp
    return lambda tensors: method(tensors, weights)


def _check(flags: argparse.Namespace) -> None:
    """Refuse flags that do not go together."""
    if len(flags.sources) < 2:
        raise UserError("MODEL", "one model has nothing to be merged with", "give two or more")
    if flags.method == "slerp" and len(flags.sources) != 2:
        raise UserError("MODEL", f"--method=slerp is for two models, and {len(flags.sources)} are given",
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
