"""Write a model in few bits for other programs: a GGUF file, or a folder of 4-bit layers.

    jaxtrain quantize MODEL --output=model.gguf --format=q8_0
    jaxtrain quantize MODEL --output=FOLDER --format=int4
    jaxtrain quantize MODEL --output=FOLDER --format=int4 --calibrate=texts.txt
    jaxtrain quantize MODEL --output=FOLDER --format=awq --calibrate=texts.txt

A model is a folder in Hugging Face's format, hf:ORG/NAME on the Hugging Face Hub, or WORKDIR[@STEP] of a run, which is
exported first. f32, f16, bf16 and q8_0 are GGUF, which llama.cpp reads; int4 is a folder in the format of
compressed-tensors, which transformers, vLLM and SGLang read. With --calibrate, weights are rounded by GPTQ, so that
what layers make of this text changes least; without, to the nearest. awq is a folder in AWQ's own format, for servers
that have kernels for it: inputs are scaled by what they are in this text before weights are rounded.
"""

import argparse
import contextlib
import shutil
from pathlib import Path

from jaxtrain.commands.flags import add_overwrite, command, parser_of
from jaxtrain.errors import UserError, say
from jaxtrain.hub import export
from jaxtrain.hub.merge import published_folder
from jaxtrain.hub.release.gguf_file import KINDS
from jaxtrain.pages.plain_text import in_bytes

INT4, AWQ = FOLDERS = "int4", "awq"


@command()
def main(argv: list[str] | None = None) -> None:
    """Parse the flags and write."""
    parser = parser_of("quantize", __doc__)
    parser.add_argument("source", metavar="MODEL", help="a folder in Hugging Face's format, hf:ORG/NAME on the Hugging "
                        "Face Hub, or WORKDIR[@STEP]")
    parser.add_argument("--output", dest="to", required=True, metavar="PATH",
                        help="a new file for GGUF, a new folder for int4 and awq")
    add_overwrite(parser, "an earlier model there")
    parser.add_argument("--format", required=True, choices=(*KINDS, *FOLDERS), help="format of the weights")
    parser.add_argument("--group", type=int, help="int4, awq: inputs of a layer that share a scale; default: 128")
    parser.add_argument("--calibrate", metavar="FILE", help="int4, awq: text to round by (int4: by GPTQ)")
    parser.add_argument("--rows", type=int, help="int4, awq: rows of text to read; default: 64")
    parser.add_argument("--row_tokens", type=int, help="int4, awq: tokens of a row; default: 512")
    flags = parser.parse_args(argv)
    _check(flags)
    to = Path(flags.to)
    with contextlib.ExitStack() as opened:
        folder = published_folder(flags.source, to, opened)
        if flags.format in FOLDERS:
            from jaxtrain.hub.release import awq_folder, int4_folder

            moments = _moments(folder, Path(flags.calibrate), flags) if flags.calibrate else None
            if flags.format == AWQ and moments is not None:
                record = awq_folder.write(folder, to, flags.group or 128, moments, overwrite=flags.overwrite)
            else:
                record = int4_folder.write(folder, to, flags.group or 128, moments, overwrite=flags.overwrite)
            say(f"{to} has {flags.source} in 4 bits, rounded {_HOW[record['rounding']]}")
            return
        from jaxtrain.hub.release import gguf_file

        shutil.rmtree(to.with_name(f"{to.name}.partial"), ignore_errors=True)  # made for folders; this is a file
        size = gguf_file.write(folder, to, flags.format, Path(flags.source).name)
        say(f"{to} has {flags.source} in {flags.format}, {in_bytes(size)}")


_HOW = {"nearest": "to the nearest", "gptq": "by GPTQ", "awq": "by AWQ"}


def _check(flags: argparse.Namespace) -> None:
    """Refuse flags that do not go together, and files that are there."""
    for name in ("group", "calibrate", "rows", "row_tokens"):
        if getattr(flags, name) is not None and flags.format not in FOLDERS:
            raise UserError(f"--{name}", "it is read with --format=int4 and awq only", "leave it out")
        if name in ("rows", "row_tokens") and getattr(flags, name) is not None and not flags.calibrate:
            raise UserError(f"--{name}", "it is read with --calibrate only", "leave it out")
        if name != "calibrate" and getattr(flags, name) is not None and getattr(flags, name) < 1:
            raise UserError(f"--{name}", f"{getattr(flags, name)} is not a number of them", "give 1 or more")
    if flags.group is not None and flags.group % 8:
        raise UserError("--group", f"{flags.group} is no multiple of 8", "give 32, 64 or 128")
    if flags.format == AWQ and not flags.calibrate:
        raise UserError("--calibrate", "awq scales inputs by what they are in a text",
                        "name a file of text, or use int4")
    if flags.format not in FOLDERS and Path(flags.to).exists() and not flags.overwrite:
        raise UserError("--output", f"{flags.to} is there already", "name another file, or add --overwrite")
    if flags.format in FOLDERS:
        export.check_is_new(Path(flags.to), flags.overwrite)


def _moments(folder: Path, text: Path, flags: argparse.Namespace):
    """Return the moments of the inputs of layers, of the beginning of a text."""
    import numpy as np

    from jaxtrain.hub.release import calibration
    from jaxtrain.hub.trained_tokenizer import tokenizer_of

    rows, length = flags.rows or 64, flags.row_tokens or 512
    try:
        content = text.read_text(errors="replace")[:64 * rows * length]
    except OSError as error:
        raise UserError("--calibrate", f"{text} cannot be read ({error.strerror})", "give a file of text") from None
    tokens = np.asarray(tokenizer_of(folder).encode(content.encode()), np.int32)
    if len(tokens) < length:
        raise UserError("--calibrate", f"{text} has {len(tokens)} tokens, fewer than a row of {length}",
                        "give a longer text, or lower --row_tokens")
    rows = min(rows, len(tokens) // length)
    return calibration.moments_of(folder, tokens[:rows * length].reshape(rows, length))
