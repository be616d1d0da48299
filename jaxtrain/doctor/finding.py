"""The result of a check: how bad it is, what it is, and how to fix it."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

WIDTH = 120


@dataclass(frozen=True)
class Finding:
    """One line of the report; every level except ok has a fix."""

    level: str  # ok, note (nothing wrong, worth knowing), warn (slow or risky), FAIL (training would not work)
    check: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<4}  {self.check}: {self.what}"
        if not self.fix:
            return line
        return f"{line}; {self.fix}" if len(line) + len(self.fix) + 2 <= WIDTH else f"{line}\n      fix: {self.fix}"


def ok(check: str, what: str) -> Finding:
    """Return a finding that all is well."""
    return Finding("ok", check, what)


def note(check: str, what: str, fix: str) -> Finding:
    """Return a finding that is worth knowing, although nothing is wrong."""
    return Finding("note", check, what, fix)


def warn(check: str, what: str, fix: str) -> Finding:
    """Return a finding that training would be slow, or may fail."""
    return Finding("warn", check, what, fix)


def fail(check: str, what: str, fix: str) -> Finding:
    """Return a finding that training would not work."""
    return Finding("FAIL", check, what, fix)


def guarded(check: str, look: Callable[[], Iterable[Finding]], seconds: float) -> list[Finding]:
    """Return the findings of a check; a crash or a timeout is also a finding."""
    found: list[Finding] = []

    def run() -> None:
        try:
            found.extend(look())
        except Exception as error:  # the other checks still run
            words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            found.append(warn(check, f"could not check ({words})", "check it by hand; the other checks still ran"))

    thread = threading.Thread(target=run, name=check, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return [warn(check, f"could not check within {seconds:.0f} s", "something hangs: check it by hand")]
    return found


def size(count: float) -> str:
    """Format a number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
