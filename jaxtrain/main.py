"""python -m jaxtrain.main --config=configs/gpt.py[:variant] [--config.SECTION.KEY=VALUE ...] [--workdir=DIR]"""

import argparse
import json
import sys
import warnings
from pathlib import Path

from jaxtrain.errors import Parser, UserError, overrides_of
from jaxtrain.resilience import exits, lifeline
from jaxtrain.resilience.interrupt import before_the_loop


def main(argv: list[str] | None = None) -> int:
    """Flags, processes, config, train. `resilience/exits.py` tells what the exit status means."""
    lifeline.hold()
    try:
        with before_the_loop():
            return left(run(*parse(sys.argv[1:] if argv is None else argv)))
    except exits.Ended as end:  # in all processes alike
        print(end, file=sys.stderr)
        return left(end.code)
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        return left(exits.MISTAKE, mistake)
    except KeyboardInterrupt as stop:
        print("stopped at once; what was saved before is kept", file=sys.stderr)
        return left(exits.INTERRUPTED, stop)
    except Exception as error:
        left(1, error)  # returns where no other process waits for this one
        raise


def left(status: int, error: BaseException | None = None) -> int:
    """Take leave of the other processes, if there are any: as agreed, or alone with an error."""
    distributed = sys.modules.get("jaxtrain.distributed")
    if distributed is None:  # it did not come to that
        return status
    return distributed.leave(status) if error is None else distributed.fail(status, error)


def run(flags: argparse.Namespace, overrides: dict[str, str]) -> int:
    """What the flags ask for."""
    from jaxtrain import cache, config, distributed

    # For whoever watches a run the line of code that warns is of no use.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    cache.enable_compilation_cache()
    distributed.initialize(flags.coordinator, flags.num_processes, flags.process_id)
    resolved = config.load_config(flags.config, overrides)
    distributed.agree(resolved)
    if flags.print_config:
        shown = resolved.to_dict()
        if flags.print_config == "diff":
            changes = config.diff(resolved, config.load_config(flags.config))
            shown = {key: value for key, (value, _) in changes.items()}
        print(json.dumps(shown, indent=2))
        return exits.DONE
    from jaxtrain.train import train

    if resolved.resilience.elastic:
        from jaxtrain.resilience import elastic

        resolved = elastic.here(resolved, workdir_of(flags))
    train(resolved, workdir_of(flags))
    return exits.DONE


def workdir_of(flags: argparse.Namespace) -> Path:
    """Where the run lives: as given, or after its config."""
    return Path(flags.workdir or Path("runs", Path(flags.config.replace(".py", "").replace(":", "-")).name))


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
