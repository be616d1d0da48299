"""A user's mistake, told in one sentence: the key, the reason, the fix."""

import contextlib
import difflib
import sys
from collections.abc import Iterable


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
