"""python -m jaxtrain.main --config=configs/gpt.py[:variant] [--config.SECTION.KEY=VALUE ...] [--workdir=DIR]"""

import argparse
import json
import sys
from pathlib import Path

from jaxtrain.errors import UserError, nearest


def main(argv: list[str] | None = None) -> int:
    """Flags, processes, config, train. Exit status 0: the last step was reached; 2: the user's mistake, in one line."""
    try:
        flags, overrides = parse(sys.argv[1:] if argv is None else argv)
        from jaxtrain import cache, config, distributed

        cache.enable_compilation_cache()
        distributed.initialize(flags.coordinator, flags.num_processes, flags.process_id)
        resolved = config.load_config(flags.config, overrides)
        if flags.print_config:
            changed = {key: value for key, (value, _) in config.diff(resolved, config.load_config(flags.config)).items()}
            print(json.dumps(changed if flags.print_config == "diff" else resolved.to_dict(), indent=2))
            return 0
        from jaxtrain.train import Interrupted, train

        try:
            train(resolved, flags.workdir or Path("runs") / Path(flags.config.replace(".py", "").replace(":", "-")).name)
        except Interrupted as stop:
            print(stop, file=sys.stderr)
            return 128 + stop.signal
        return 0
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        return 2


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """The flags, and the dotted config overrides."""
    parser = argparse.ArgumentParser(prog="python -m jaxtrain.main", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", required=True, help="a config file such as configs/gpt.py, or configs/gpt.py:124m")
    parser.add_argument("--workdir", help="metrics, checkpoints and the resolved config go here; default runs/CONFIG")
    parser.add_argument("--print_config", nargs="?", const="all", choices=("all", "diff"),
                        help="print the resolved config (or what the overrides changed in it) and stop")
    parser.add_argument("--coordinator", help="host:port of process 0 in a run of several processes")
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--process_id", type=int)
    parser.error = _refuse
    flags, rest = parser.parse_known_args(argv)
    overrides = {}
    for word in rest:
        key, equals, value = word.removeprefix("--config.").partition("=")
        if not word.startswith("--config.") or not equals:
            known = [f"--{name}" for name in vars(flags)] + ["--config.SECTION.KEY=VALUE"]
            raise UserError(word, "there is no such flag", nearest(word.partition("=")[0], known))
        overrides[key] = value
    return flags, overrides


def _refuse(message: str) -> None:
    raise UserError("command line", message, "see --help")


if __name__ == "__main__":
    sys.exit(main())
