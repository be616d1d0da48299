"""A user's mistake, told in one sentence: the key, the reason, the fix."""

import argparse
import contextlib
import difflib
import functools
import os
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn


class UserError(ValueError):
    """Something the user can put right; the command line prints it as one line and exits with status 2."""

    def __init__(self, key: str, reason: str, fix: str):
        self.key, self.reason, self.fix = key, reason, fix
        super().__init__(" ".join(f"{key}: {reason}; {fix}".split()))

    def __reduce__(self):  # so that one may come from another process
        return type(self), (self.key, self.reason, self.fix)


def say(text: object) -> None:
    """To whoever watches; a log on a disk that is full is no reason to end."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def nearest(word: str, known: Iterable[str]) -> str:
    """A suggestion for a misspelt name: the nearest known one, else all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def overrides_of(words: Iterable[str], flags: Iterable[str]) -> dict[str, str]:
    """What command-line words set by --config.SECTION.KEY=VALUE; `flags` are the names of those there are besides."""
    overrides = {}
    for word in words:
        key, equals, value = word.removeprefix("--config.").partition("=")
        if word.startswith("--config.") and not equals:
            raise UserError(word, "it has no value", f"write {word}=VALUE")
        if not word.startswith("--config."):
            if "." in word.partition("=")[0]:
                raise UserError(word, "there is no such flag", f"write --config.{word.lstrip('-')}")
            known = [f"--{name}" for name in flags] + ["--config.SECTION.KEY=VALUE"]
            raise UserError(word, "there is no such flag", nearest(word.partition("=")[0], known))
        overrides[key] = value
    return overrides


class Parser(argparse.ArgumentParser):
    """Of a command line whose mistakes are UserErrors; flags cannot be abbreviated."""

    def __init__(self, **keys):
        super().__init__(allow_abbrev=False, **keys)

    def add_argument(self, *names, **keys):
        """Of a flag that takes several values, all count, however often it is given."""
        if keys.get("nargs") == "+":
            keys.setdefault("action", "extend")
        return super().add_argument(*names, **keys)

    def error(self, message: str) -> NoReturn:
        """Instead of usage and exit."""
        words = message.removeprefix("unrecognized arguments: ").split() if message.startswith("unrec") else []
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        fix = nearest(flags[0], self._option_string_actions) if flags else "see --help"
        raise UserError("command line", message, "several values stand behind a flag without =, as in --input a b"
                        if words and not flags else fix)


def command(stopped: str = "stopped") -> Callable[[Callable[[list[str] | None], None]], Callable[..., int]]:
    """Makes a command's main: exit status 0; 2 behind the user's mistake, told in one line; 130 if stopped by hand."""
    def wrap(do: Callable[[list[str] | None], None]) -> Callable[..., int]:
        @functools.wraps(do)
        def main(argv: list[str] | None = None) -> int:
            try:
                do(argv)
                return 0
            except UserError as mistake:
                say(mistake)
                return 2
            except KeyboardInterrupt:
                say(stopped)
                return 130
            except BrokenPipeError:  # who reads has seen enough, as `head` has
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python would try again at exit
                return 0

        return main

    return wrap
