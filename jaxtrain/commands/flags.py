"""The flags that the commands share, and the reporting of their mistakes; imports no JAX, so that `--help` is fast."""

import argparse
import functools
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from jaxtrain.base import exit_statuses
from jaxtrain.base.json_output import tell_json as tell_json
from jaxtrain.errors import UserError, nearest, say
from jaxtrain.redaction import hide_in_tracebacks, printable


def command(stopped: str = "stopped") -> Callable[[Callable[[list[str] | None], None]], Callable[..., int]]:
    """Return a decorator for a command's main: exit status 0, 2 on a user error (told in one line), 130 on Ctrl-C.

    Other processes of the command, if any, are told of its end.
    """
    def wrap(do: Callable[[list[str] | None], None]) -> Callable[..., int]:
        @functools.wraps(do)
        def main(argv: list[str] | None = None) -> int:
            hide_in_tracebacks()
            warn_in_one_line()
            try:
                do(argv)
                return exit_process(exit_statuses.DONE)
            except UserError as mistake:
                say(mistake)
                return exit_process(exit_statuses.MISTAKE, mistake)
            except KeyboardInterrupt as stop:
                say(stopped)
                return exit_process(exit_statuses.INTERRUPTED, stop)
            except BrokenPipeError:  # the reader closed the pipe, as `head` does
                discard_output()
                return exit_process(exit_statuses.DONE)
            except SystemExit:  # raised in all processes alike
                exit_process(exit_statuses.DONE)
                raise
            except Exception as error:
                exit_process(exit_statuses.NO, error)  # returns in a single-process run
                raise

        return main

    return wrap


def exit_process(status: int, error: BaseException | None = None) -> int:
    """Disconnect from the other processes, if any: in agreement, or alone after an error."""
    processes = sys.modules.get("jaxtrain.distributed.processes")
    if processes is None:  # it failed before they were imported
        return status
    return processes.leave(status) if error is None else processes.fail(status, error)


def warn_in_one_line() -> None:
    """Leave out of warnings from now on the line of code that issues them, which is of no use to a user."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {printable(message)}\n"


def discard_output() -> None:
    """Write standard output nowhere from now on, since its reader is gone and Python would try again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


# Names of flags in earlier versions, and what the flag is called now in the commands that have it.
RENAMED = {"to": "output", "html": "output", "svg": "output", "png": "output", "save": "output", "json": "output",
           "folder": "workdir", "least": "min_processes", "full": "processes", "steps": "filters", "target": "label",
           "samples": "log_samples", "tokens": "token_ids", "global_batch": "global_batch_size", "seconds": "timeout",
           "report": "all", "field": "text_field", "text_column": "text_field", "audio_column": "audio_field",
           "picture_field": "image_field", "special_tokens": "parse_special_tokens", "force": "overwrite"}


class _Help(argparse.HelpFormatter):
    """A help formatter that wraps paragraphs and leaves indented lines as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = [part if re.search(r"^ ", part, re.M) else textwrap.fill(" ".join(part.split()), width)
                 for part in text.split("\n\n")]
        return "\n\n".join(parts)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UserErrors; flags may be written with dashes, and cannot be abbreviated.

    Args:
        text: the `--help` text: paragraphs, and indented lines, which are examples.
    """

    def __init__(self, text: str | None = None, **keys: Any):
        examples = re.findall(r"^ {4}(\S.*)$", text or "", re.M)
        about = re.sub(r"\n{3,}", "\n\n", re.sub(r"^ {4}.*$", "", text or "", flags=re.M)).strip()
        shown = "\n".join(["examples:" if len(examples) > 1 else "example:", *(f"  {line}" for line in examples)])
        super().__init__(allow_abbrev=False, formatter_class=_Help, description=about, epilog=shown if examples else "",
                         **keys)

    def add_argument(self, *names, **keys):
        """Add an argument; all values of a flag with several values count, however often it is given."""
        if keys.get("nargs") == "+":
            keys.setdefault("action", "extend")
        return super().add_argument(*names, **keys)

    def group(self, title: str, *names: str) -> None:
        """Show these flags, which were added before, under a title of their own in `--help`."""
        group = self.add_argument_group(title)
        for action in [self._option_string_actions[f"--{name}"] for name in names]:
            self._optionals._group_actions.remove(action)
            group._group_actions.append(action)

    def parse_known_args(self, args=None, namespace=None):  # pyrefly: ignore[bad-override]
        """Parse what is before a `--` with flags as they are spelled here."""
        words = sys.argv[1:] if args is None else list(args)
        end = words.index("--") if "--" in words else len(words)
        overrides, flags = _overrides_apart(words[:end])
        found, rest = super().parse_known_args([*map(self._spelled, flags), *words[end:]], namespace)
        return found, [*overrides, *rest]

    def _spelled(self, word: str) -> str:
        """Return a flag that has dashes for underscores as it is spelled here."""
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        known = {_folded(option): option for option in self._option_string_actions}
        if _folded(name) not in known and (new := RENAMED.get(_folded(name))) in known:
            raise UserError(name, "it has another name now", f"write {known[new]}")
        return f"{known.get(_folded(name), name)}{equals}{value}"

    def error(self, message: str) -> NoReturn:
        """Raise a UserError instead of printing the usage."""
        words = message.removeprefix("unrecognized arguments: ").split() if message.startswith("unrec") else []
        if flag := next((word for word in words if word.startswith("--")), None):
            fix = nearest(flag.partition("=")[0], self._option_string_actions)
            raise UserError(flag, "there is no such flag", f"see {self.prog} --help" if "known: " in fix else fix)
        raise UserError("command line", message,
                        "several values follow a flag without =, as in --input a b" if words else "see --help")


def _overrides_apart(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words that set keys of the config, and all others.

    argparse would take the value of a key for a positional argument if it contains a space.
    """
    overrides, flags = [], []
    for before, word in zip(["", *words], words, strict=False):
        value_apart = before.startswith("--config.") and "=" not in before and not word.startswith("--")
        (overrides if word.startswith("--config.") or value_apart else flags).append(word)
    return overrides, flags


def _folded(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


class _OneConfig(argparse.Action):
    """Keeps the config, which comes first or as --config, and refuses a second one."""

    def __call__(self, parser, namespace, values, option_string=None):
        before = getattr(namespace, "config", None)
        if before and values and before != values:
            raise UserError("CONFIG", f"two are given, {before} and {values}", "give one")
        namespace.config = values


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the config that a command reads: CONFIG as the first word, or --config=CONFIG."""
    parser.add_argument("--config", action=_OneConfig, help=argparse.SUPPRESS)
    parser.add_argument("config", nargs="?", action=_OneConfig, default=argparse.SUPPRESS, metavar="CONFIG",
                        help="the name of a config such as gpt or gpt:124m (`jaxtrain configs` lists them), or a file "
                             "of your own such as mine.py; --config=CONFIG is the same, and "
                             "--config.SECTION.KEY=VALUE sets any key of it")


def need_config(flags: argparse.Namespace) -> None:
    """Refuse a command line without a config."""
    if not flags.config:
        raise UserError("CONFIG", "it is missing", "give a config, such as gpt or configs/gpt.py")


def parser_of(name: str, text: str | None, **keys) -> Parser:
    """Return the parser of a subcommand; `text` is the docstring of its module."""
    return Parser(text, prog=f"jaxtrain {name}", **keys)


def add_subcommand(commands: Any, of: str, words: str, line: str) -> argparse.ArgumentParser:
    """Add what `jaxtrain OF NAME ...` does; `words` are those behind OF in its example, `line` says what it does."""
    text = f"{line[0].upper()}{line[1:]}.\n\n    jaxtrain {of} {words}"
    return commands.add_parser(words.partition(" ")[0], help=line, text=text)


def add_json(parser: argparse.ArgumentParser, what: str = "print one JSON object per line") -> None:
    """Add --json, by which a command prints what a script can read."""
    parser.add_argument("--json", action="store_true", help=what)


def add_dry_run(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --dry_run, by which a command says what it would do, and does nothing."""
    parser.add_argument("--dry_run", action="store_true", help=what)


def add_overwrite(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --overwrite, without which a command leaves alone what is there."""
    parser.add_argument("--overwrite", action="store_true", help=f"replace {what}, if it is there")


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that make several processes one run."""
    group = parser.add_argument_group("several processes")
    group.add_argument("--coordinator", help="host:port of process 0 in a run of several processes")
    group.add_argument("--num_processes", type=int, help="number of processes of the run")
    group.add_argument("--process_id", type=int, help="number of this process, from 0")


def workdir_of(flags: argparse.Namespace) -> Path:
    """Return the run's workdir: as given, or named after its config."""
    return Path(flags.workdir or default_workdir(flags.config))


def default_workdir(config: str) -> str:
    """Return the workdir of a config that is given none, such as runs/finetune-lora-models-smol.

    All of the variant is in the name, since models of one name may be in several folders.
    """
    file, _, variant = config.partition(".py:" if ".py" in config or ".json" in config else ":")
    if config.startswith("hf:"):
        file, variant = "", config.removeprefix("hf:")
    path = Path(file.removesuffix(".py"))
    name = f"{path.absolute().parent.name}-config" if path.name == "config.json" else path.name.removesuffix(".json")
    return f"runs/{re.sub(r'[^A-Za-z0-9_.@]+', '-', f'{name}:{variant}').strip('-.')}"


def overrides_of(words: Iterable[str], flags: Iterable[str]) -> dict[str, str]:
    """Return what --config.SECTION.KEY=VALUE words set; `flags` are the names of the other flags, for suggestions."""
    overrides = {}
    for word in words:
        key, equals, value = word.removeprefix("--config.").partition("=")
        if word.startswith("--config.") and "/" in key.partition(".")[0]:  # a path
            raise UserError(word, "there is no such key", _instead_of(word, flags))
        if word.startswith("--config.") and not equals:
            raise UserError(word, "it has no value", f"write {word}=VALUE")
        if not word.startswith("--config."):
            raise UserError(word, "there is no such flag", _instead_of(word, flags))
        section, *names = key.split(".")
        names[:1] = [name.replace("-", "_") for name in names[:1]]  # what follows may be a name of the user's own
        overrides[".".join([section, *names])] = value
    return overrides


def _instead_of(word: str, flags: Iterable[str]) -> str:
    """Return what to write in place of a word that is no flag."""
    name, equals, _ = word.partition("=")
    if "/" in name or re.search(r"\.(py|json)\b", name):
        return "give one config, in front of the flags and without dashes, such as configs/gpt.py:tiny"
    if re.fullmatch(r"(--)?\w+(\.[\w-]+)+", name):
        return f"write --config.{word.lstrip('-')}{'' if equals else '=VALUE'}"
    if not name.startswith("-"):
        return "write flags as --NAME=VALUE, and keys of the config as --config.SECTION.KEY=VALUE"
    return _nearest_flag(name.lstrip("-").replace("-", "_"), flags)


def _nearest_flag(name: str, flags: Iterable[str]) -> str:
    from jaxtrain.config.suggestions import nearest_key

    flags = sorted(flags)
    if (flag := nearest(name, flags)).startswith("did"):
        return flag.replace(" '", " '--")
    return nearest_key(name).replace(" '", " '--config.") or "see --help"


def folders_by_name(text: str) -> dict[str, str]:
    """Return the folders by name in NAME=FOLDER,NAME=FOLDER."""
    pairs = [one.partition("=") for one in text.split(",")]
    if not all(name and folder for name, _, folder in pairs) or len({name for name, *_ in pairs}) < len(pairs):
        raise UserError("--adapters", f"{text!r} is not a list of different names with folders",
                        "write NAME=FOLDER,NAME=FOLDER")
    return {name: folder for name, _, folder in pairs}
