"""python -m jaxtrain.main --config=configs/gpt.py[:variant] [--config.SECTION.KEY=VALUE ...] [--workdir=DIR]"""

import argparse
import json
import sys
import warnings
from pathlib import Path

from jaxtrain.errors import Parser, UserError, overrides_of


def main(argv: list[str] | None = None) -> int:
    """Flags, processes, config, train. Exit status 0: the last step was reached; 2: the user's mistake, in one line."""
    try:
        flags, overrides = parse(sys.argv[1:] if argv is None else argv)
        from jaxtrain import cache, config, distributed

        # For whoever watches a run the line of code that warns is of no use.
        warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
        cache.enable_compilation_cache()
        distributed.initialize(flags.coordinator, flags.num_processes, flags.process_id)
        resolved = config.load_config(flags.config, overrides)
        if flags.print_config:
            shown = resolved.to_dict()
            if flags.print_config == "diff":
                changes = config.diff(resolved, config.load_config(flags.config))
                shown = {key: value for key, (value, _) in changes.items()}
            print(json.dumps(shown, indent=2))
            return 0
        from jaxtrain.resilience import Corrupted
        from jaxtrain.train import Interrupted, train

        name = Path(flags.config.replace(".py", "").replace(":", "-")).name
        try:
            train(resolved, flags.workdir or Path("runs", name))
        except Interrupted as stop:
            print(stop, file=sys.stderr)
            return 128 + stop.signal
        except Corrupted as found:
            print(found, file=sys.stderr)
            return found.status
        return 0
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped at once; what was saved before is kept", file=sys.stderr)
        return 130


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


if __name__ == "__main__":
    sys.exit(main())
