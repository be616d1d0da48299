"""Find and kill processes that daemons of a test's cluster have left."""

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found += [int(path.parent.name), *descendants(int(path.parent.name))]
    return found


def writers(folder: Path) -> list[int]:
    """Return the processes that have a file under a folder open."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(Path(os.readlink(each)).is_relative_to(folder) for each in path.iterdir()):
                found.append(int(path.parent.name))
    return found


def kill(pids: Iterable[int]) -> None:
    """Kill processes, of which some may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
