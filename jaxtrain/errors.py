"""User errors, reported in one sentence: the key, the reason, the fix."""

import contextlib
import difflib
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from jaxtrain.redaction import printable, redacted
from jaxtrain.synonyms import SYNONYMS


class UserError(ValueError):
    """An error that the user can fix; the command line prints it as one line and exits with status 2."""

    def __init__(self, key: str, reason: str, fix: str):
        key, reason, fix = self.key, self.reason, self.fix = redacted((key, reason, fix))
        super().__init__(printable(" ".join(f"{key}: {reason}; {fix}".split())))

    def __reduce__(self):  # so that it can be pickled between processes
        return type(self), (self.key, self.reason, self.fix)


def say(text: object) -> None:
    """Print a message to stderr, without credentials and terminal escapes; a full disk does not stop a run."""
    with contextlib.suppress(OSError):
        print(printable(redacted(f"{text}")) + "\n", end="", file=sys.stderr, flush=True)  # whole


def tell(*texts: object, **how: Any) -> None:
    """Print, to stdout unless `how` says otherwise, as `print` does, but without what steers a terminal."""
    print(*map(printable, texts), **how)


def tell_text(text: str, end: str = "\n") -> None:
    """Print text of a model to stdout, as it is unless that is a terminal.

    Some languages need marks of direction, which `tell` writes as escapes into a file or a pipe as well. Half
    characters, which no encoding has, are escapes everywhere.
    """
    print(printable(text) if sys.stdout.isatty() else text.encode(errors="backslashreplace").decode(), end=end)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a suggestion for a name that is not known: what it is called here, the nearest one, or all of them."""
    known, dashes = sorted(filter(None, known)), word[:2] if word.startswith("--") else ""
    meant = SYNONYMS.get(word.removeprefix(dashes).lower().replace("-", "_"), "")
    if " " in meant:
        return meant
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.65 if len(word) > 2 else 1)
    longer = [name for name in known if len(word) > 3 and word in name]
    best = [name for name in (f"{dashes}{meant}", *close, *longer) if name in known][:1]
    return f"did you mean {best[0]!r}?" if best else f"known: {', '.join(known)}"


def nearest_few(word: str, known: Collection[str], where: str) -> str:
    """Return a suggestion for a name that is not among very many known ones: the nearest few, and where all are."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f"the nearest of {len(known)}: {', '.join(close)}; {where}" if close else f"{len(known)} are known: {where}"


def install_extra(name: str) -> str:
    """Return the words for how to install an extra of this package, from a checkout if that is where it is."""
    if (Path(__file__).parents[1] / "pyproject.toml").is_file():
        return f"run pip install -e '.[{name}]' in jaxtrain's folder"
    return f"run pip install 'jaxtrain[{name}]'"
