"""List, version, merge or export adapters (LoRA) in PEFT's format.

    jaxtrain adapters export WORKDIR --output=FOLDER
    jaxtrain adapters list FOLDER
    jaxtrain adapters add STORE FOLDER --name=NAME
    jaxtrain adapters merge MODEL FOLDER=1.0 FOLDER=0.5 --output=MERGED

A store is a folder with a folder for each name, and in it one for each version: STORE/NAME/1, STORE/NAME/2.
"""

import argparse
import math
from functools import partial
from pathlib import Path

from jaxtrain.commands.flags import (
    Parser,
    add_json,
    add_overwrite,
    add_process_flags,
    add_subcommand,
    command,
    parser_of,
    tell_json,
)
from jaxtrain.errors import UserError, say, tell


@command()
def main(argv: list[str] | None) -> None:
    """Run the command."""
    flags = parser().parse_args(argv)
    from jaxtrain.hub.adapters import adapter_commands, adapter_merge  # which import JAX, as --help does not

    if flags.what == "list":
        found = adapter_commands.listed(Path(flags.folder))
        if flags.json:
            tell_json(*found)
        else:
            tell("\n".join(map(adapter_commands.shown, found)) or f"{flags.folder} has no adapters")
    elif flags.what == "add":
        tell(adapter_commands.add(Path(flags.store), Path(flags.folder), flags.name))
    elif flags.what == "merge":
        adapter_merge.merge(flags.base, [_weighted(text) for text in flags.adapters], Path(flags.to), flags.dtype,
                            flags.overwrite)
        say(f"{flags.to} has the model in {flags.base} with {len(flags.adapters)} adapters")
    else:
        from jaxtrain.distributed import processes

        processes.initialize(flags.coordinator, flags.num_processes, flags.process_id)
        step = adapter_commands.export(Path(flags.workdir), Path(flags.to), flags.step, base=flags.base,
                                       dtype=flags.dtype, averaged=flags.ema, overwrite=flags.overwrite)
        say(f"{flags.to} has the adapters of step {step} of {flags.workdir}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = parser_of("adapters", __doc__)
    commands = made.add_subparsers(dest="what", required=True, parser_class=Parser)

    add = partial(add_subcommand, commands, "adapters")
    exports = add("export WORKDIR --output=FOLDER", "export the adapters that a run has trained")
    exports.add_argument("workdir", metavar="WORKDIR", help="workdir of the run")
    exports.add_argument("--output", dest="to", required=True, metavar="FOLDER", help="a new folder for the adapters")
    add_overwrite(exports, "an earlier export in that folder")
    exports.add_argument("--step", type=int, help="step of the checkpoint; default: the newest verified one")
    exports.add_argument("--ema", action="store_true", help="use their moving average (train.ema_decay)")
    exports.add_argument("--base", default="", help="the name or folder of the model they are for; by default the "
                                                    "published folder that the run began with")
    add_process_flags(exports)
    lists = add("list FOLDER", "list the adapters in a folder and its subfolders")
    lists.add_argument("folder", metavar="FOLDER", help="folder of adapters, or a store of them")
    add_json(lists)
    adds = add("add STORE FOLDER --name=NAME", "add adapters to a store, as the next version of a name")
    adds.add_argument("store", metavar="STORE", help="folder of the store; created if missing")
    adds.add_argument("folder", metavar="FOLDER", help="folder of the adapters")
    adds.add_argument("--name", required=True, help="name of the adapters in the store")
    merges = add("merge MODEL FOLDER=0.5 "
                 "--output=MERGED", "merge adapters, each multiplied by a weight, into the model's weights")
    merges.add_argument("base", metavar="MODEL", help="folder of the model, in Hugging Face's format")
    merges.add_argument("adapters", metavar="FOLDER[=WEIGHT]", nargs="+", action="store",
                        help="folder of adapters and their factor; default: 1")
    merges.add_argument("--output", dest="to", required=True, metavar="FOLDER", help="a new folder for the model")
    add_overwrite(merges, "an earlier merged or exported model in that folder")
    merges.add_argument("--dtype", choices=("bfloat16", "float32"), help="dtype of the weights; default: as in MODEL")
    exports.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32",
                         help="dtype of the adapters")
    return made


def _weighted(text: str) -> tuple[Path, float]:
    """Return the folder and the weight of FOLDER=WEIGHT."""
    folder, _, number = text.rpartition("=") if "=" in text and not Path(text).exists() else (text, "", "1")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UserError("command line", f"{number!r} in {text!r} is not a number", "write FOLDER=0.5")
    return Path(folder), weight
