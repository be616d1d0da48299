"""The `jaxtrain` command: its subcommands are the modules of `flags.COMMANDS`."""

import os
import platform
import sys

from jaxtrain.errors import UserError, nearest
from jaxtrain.flags import COMMANDS, command

GROUPS = {  # the commands as `--help` lists them
    "train": ("train", "supervise", "launch", "jobs", "sweep", "elastic", "islands"),
    "data": ("prepare", "prepare_sequences", "train_tokenizer", "inspect", "publish", "croissant"),
    "trained models": ("generate", "transcribe", "evaluate", "export", "merge", "adapters"),
    "runs": ("runs", "top", "report", "checkpoint", "goodput", "dashboards"),
    "speed and planning": ("plan", "calibrate", "bench", "profile", "scaling", "schedules", "coordinates"),
    "machines": ("doctor",),
}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand exactly as `python -m` runs its module, or list them all."""
    words = sys.argv[1:] if argv is None else argv
    if status := chosen(words[:1]):
        return status
    if not words or words[0] not in COMMANDS:
        return 0
    import runpy

    sys.argv = [f"jaxtrain {words[0]}", *words[1:]]
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where `python -m` finds modules of one's own
    runpy.run_module(COMMANDS[words[0]][0], run_name="__main__", alter_sys=True)
    return 0


@command()
def chosen(words: list[str] | None) -> None:
    """Refuse a first word that is not a subcommand; list them all if there is none, or for `--help`, and versions."""
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        groups = ["\n".join([f"{title}:", *(f"  {known:<19}{COMMANDS[known][1]}" for known in names)])
                  for title, names in GROUPS.items()]
        print("usage: jaxtrain COMMAND ...", "Train large language models in JAX on any device mesh.", *groups,
              "`jaxtrain COMMAND --help` shows the flags of a command, and examples. Flags may be written with dashes.",
              sep="\n\n")
    elif name in ("-V", "--version"):
        from jaxtrain.observe.versions import git_commit, version_of

        commit = git_commit()
        print(f"jaxtrain {version_of('jaxtrain') or '(not installed)'}{f' ({commit})' if commit else ''}, "
              f"JAX {version_of('jax')}, Python {platform.python_version()}")
    elif name.startswith("-"):
        raise UserError(name, "a command comes before its flags", f"write jaxtrain train {name}")
    elif name not in COMMANDS:
        raise UserError("jaxtrain", f"there is no command {name!r}", nearest(name, COMMANDS))


if __name__ == "__main__":
    raise SystemExit(main())
