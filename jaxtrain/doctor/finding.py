"""What a check found: how bad it is, what it is, and what to do about it."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

WIDTH = 120


@dataclass(frozen=True)
class Finding:
    """One line of the report; whatever is not ok has a fix."""

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
    """As it should be."""
    return Finding("ok", check, what)


def note(check: str, what: str, fix: str) -> Finding:
    """Nothing is wrong, but it is worth knowing."""
    return Finding("note", check, what, fix)


def warn(check: str, what: str, fix: str) -> Finding:
    """Training would be slow, or may fail."""
    return Finding("warn", check, what, fix)


def fail(check: str, what: str, fix: str) -> Finding:
    """Training would not work."""
    return Finding("FAIL", check, what, fix)


def guarded(check: str, look: Callable[[], Iterable[Finding]], seconds: float) -> list[Finding]:
    """What a check finds. One that crashes, or takes longer, is a finding too."""
    found: list[Finding] = []

    def run() -> None:
        try:
            found.extend(look())
        except Exception as error:  # whatever it is, the other checks go on
            words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            found.append(warn(check, f"could not check ({words})", "look at it by hand; other checks went on"))

    thread = threading.Thread(target=run, name=check, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return [warn(check, f"could not check within {seconds:.0f} s", "something there hangs: look at it by hand")]
    return found


def size(count: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
