"""The flags of `python -m jaxtrain.main`, for it and for those that start it. Without JAX."""

import argparse
from pathlib import Path

from jaxtrain.errors import Parser, UserError, overrides_of


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """The flags, and the dotted config overrides."""
    parser = Parser(prog="python -m jaxtrain.main")
    parser.add_argument("--config", help="a config file such as configs/gpt.py, or configs/gpt.py:124m; any key of it "
                                         "can be overridden with --config.SECTION.KEY=VALUE")
    parser.add_argument("--workdir", help="metrics, checkpoints and the resolved config go here; default runs/CONFIG")
    parser.add_argument("--print_config", nargs="?", const="all", choices=("all", "diff"),
                        help="print the resolved config (or what the overrides changed in it) and stop")
    parser.add_argument("--coordinator", help="host:port of process 0 in a run of several processes")
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--process_id", type=int)
    flags, rest = parser.parse_known_args(argv)
    overrides = overrides_of(rest, vars(flags))
    if not flags.config:
        raise UserError("--config", "it is missing", "give a config file, such as --config=configs/gpt.py")
    return flags, overrides


def workdir_of(flags: argparse.Namespace) -> Path:
    """Where the run lives: as given, or after its config."""
    return Path(flags.workdir or Path("runs", Path(flags.config.replace(".py", "").replace(":", "-")).name))
