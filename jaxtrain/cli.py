"""The `jaxtrain` command: it runs the command that its first word names, or lists them all."""

import importlib
import os
import platform
import sys

from jaxtrain.commands import COMMANDS, GROUPS
from jaxtrain.commands.flags import command
from jaxtrain.errors import UserError, nearest

_ALONE = {  # what handles signals of a process of its own, before it imports the rest
    "train": "jaxtrain.main", "bench": "jaxtrain.bench"}


def main(argv: list[str] | None = None) -> int:
    """Run a command, or list them all; `python -m jaxtrain` is the same."""
    words = sys.argv[1:] if argv is None else argv
    words = [word.replace("-", "_") if word.replace("-", "_") in COMMANDS else word for word in words[:1]] + words[1:]
    if status := chosen(words[:1]):
        return status
    if not words or words[0] not in COMMANDS:
        return 0
    name, *rest = words
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where `python -m` finds modules of one's own
    if name not in _ALONE:
        return importlib.import_module(f"jaxtrain.commands.{name}").main(rest)
    import runpy

    sys.argv = [f"jaxtrain {name}", *rest]
    runpy.run_module(_ALONE[name], run_name="__main__", alter_sys=True)
    return 0


@command()
def chosen(words: list[str] | None) -> None:
    """Refuse a first word that is not a command; list them all if there is none, or for `--help`, and versions."""
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        groups = ["\n".join([f"{title}:", *(f"  {known:<19}{line}" for known, line in lines.items())])
                  for title, lines in GROUPS.items()]
        print("usage: jaxtrain COMMAND ...", "Train large language models in JAX on any device mesh.", *groups,
              "`jaxtrain COMMAND --help` shows the flags of a command, and examples. Both may be written with dashes.",
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
