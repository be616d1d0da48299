"""Run a command in a process of its own, and end it when it takes too long or too much memory."""

import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_EVERY = 0.2  # seconds between two looks at its memory


@dataclass(frozen=True)
class Ended:
    """The end of a process: its status, what it printed, and what it took."""

    status: int  # its exit status; below zero: minus the signal that ended it
    out: str
    error: str
    seconds: float
    peak_gb: float  # the most memory that it and its children had when looked at
    stopped: str = ""  # why it was ended here


def run(command: Sequence[str], environment: Mapping[str, str], folder: Path, given: str,
        seconds: float, gigabytes: float) -> Ended:
    """Run a command with this text as its input, for at most so many seconds, and in so much memory."""
    began, peak, stopped = time.monotonic(), 0.0, ""
    with tempfile.TemporaryFile("w+") as put, tempfile.TemporaryFile("w+", errors="replace") as out, \
            tempfile.TemporaryFile("w+", errors="replace") as error:
        put.write(given)
        put.seek(0)
        process = psutil.Popen(command, cwd=folder, env=environment, stdin=put, stdout=out, stderr=error)
        try:
            while True:
                try:
                    process.wait(_EVERY)
                    break
                except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
                    peak = max(peak, _memory(process) / 1e9)
                if time.monotonic() - began > seconds:
                    stopped = f"it took more than {seconds:.3g} s"
                elif peak > gigabytes:
                    stopped = f"it took more than {gigabytes:.3g} GB of memory"
                if stopped:
                    break
        finally:
            _end(process)
        out.seek(0)
        error.seek(0)
        return Ended(process.wait(), out.read(), error.read(), time.monotonic() - began, peak, stopped)


def _memory(process: psutil.Process) -> int:
    """Return the bytes that a process and its children have in memory."""
    total = 0
    for one in _family(process):
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:  # it ended meanwhile
            continue
    return total


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _end(process: psutil.Process) -> None:
    for one in _family(process):
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
