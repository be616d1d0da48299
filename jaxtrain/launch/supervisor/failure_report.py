"""Find which of several dead processes failed first, and the lines of its log that tell why."""

import re
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.distributed import exit_codes
from jaxtrain.distributed.child_processes import Child

# Messages from processes that died because another one did.
_CONSEQUENCE = re.compile(
    r"Gloo|coordination service|CoordinationService|Connection (closed|reset) by peer|Socket closed|heartbeat"
    r"|Shutdown barrier|distributed service detected|waiting \d+ms for recv|NCCL")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Iteration)\b.*")
_FATAL = re.compile(r"^(F\d{4} .*|Fatal Python error.*|.*(?:Segmentation fault|Bus error|out of memory|"
                    r"RESOURCE_EXHAUSTED).*)", re.I)
LINES = 2000  # of the end of a log, which are searched
_NOISE = re.compile(r"SimplifiedTraceback|JaxStackTrace")


def first(children: Sequence[Child]) -> Child | None:
    """Return the child that failed first, not counting failures that only follow from a peer's, or None."""
    failed = sorted((child for child in children if child.code and not child.cut_off),
                    key=lambda child: child.died or 0.0)
    causes = [child for child in failed if not follows(child)]
    return (causes or failed or [None])[0]


def follows(child: Child) -> bool:
    """Return whether a child ended deliberately, or because another one did."""
    if child.code in (exit_codes.RESTART, exit_codes.SAVED):
        return True
    if child.code in exit_codes.FINAL:
        return False
    if child.code is not None and child.code < 0 and child.code != -6:
        return False  # killed from outside; SIGABRT is how JAX's own service ends a process
    return bool(_CONSEQUENCE.search(error_line(child.log) or "\n".join(last_lines(child.log, 5))))


def last_lines(log: Path, count: int = 12, size: int = 2**16) -> list[str]:
    """Return the last lines of a log, without redrawn progress lines."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - size))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line.rpartition("\r")[2].rstrip() for line in text.splitlines()]
    return [line for line in lines if line][-count:]


def error_line(log: Path) -> str:
    """Return the line of a log that names the error, or ""."""
    return error_in(last_lines(log, LINES))


def error_in(lines: Sequence[str]) -> str:
    """Return the last of these lines that names an error, or ""."""
    for pattern in (_EXCEPTION, _FATAL):
        found = [line for line in lines if pattern.match(line) and not _NOISE.search(line)]
        if found:
            return found[-1][:400]
    return ""


def reason(child: Child) -> str:
    """Return the line of a child's log that says why it failed, or "": of a user error or a limit, the last line."""
    error = error_line(child.log)
    if not error and child.code in (exit_codes.MISTAKE, exit_codes.STOPPED):
        error = "".join(last_lines(child.log, 1))[:400]
    return error


def verdict(child: Child, why: str = "") -> str:
    """Return a report of the first failure; `why` replaces the exit status where that does not explain it."""
    lines = "\n".join(f"  | {line}" for line in last_lines(child.log))
    error = reason(child)
    return "\n".join([f"first to fail: {why or child.words()}" + (f": {error}" if error else ""),
                      *([f"the end of {child.log}:", lines] if lines else [f"{child.log} is empty"])])
