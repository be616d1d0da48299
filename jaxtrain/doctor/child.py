"""Run code that might hang or crash in a process of its own, which prints what it measured as lines of JSON."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtrain.base.annotations import Json
from jaxtrain.distributed.child_processes import die_with_parent

Measured = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The measurements that a child printed before it ended, and how it ended."""

    measured: Measured
    end: str  # "" if it ended normally
    stderr: str = ""


def say(**measured: Json) -> None:
    """Print measurements; called in the child as soon as they are known."""
    print(json.dumps(measured), flush=True)


def run(module: str, *args: str, seconds: float, environment: Mapping[str, str] | None = None) -> Outcome:
    """Run jaxtrain.doctor.MODULE, and kill it with all that it started after `seconds`."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-m", f"jaxtrain.doctor.{module}", *args], stdin=subprocess.DEVNULL, stdout=out,
            stderr=err, env=None if environment is None else dict(environment), start_new_session=True,
            preexec_fn=die_with_parent())
        try:
            end = _ended(process.wait(seconds))
        except subprocess.TimeoutExpired:
            end = f"took longer than {seconds:.0f} s"
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            _leave(process)
        return Outcome(_objects(_content(out)), end, _content(err))


def _ended(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"died by {signal.Signals(-code).name}"
    return f"ended with status {code}" if code else ""


def _leave(process: subprocess.Popen) -> None:
    """Wait briefly for the child: one that waits for a dead file system cannot even be killed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2)


def _content(file: Any) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _objects(text: str) -> Measured:
    """Merge all JSON objects in a child's output; other lines, from libraries, are ignored."""
    found: Measured = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            if isinstance(said := json.loads(line), dict):
                found |= said
    return found


class Budget:
    """A time budget for measurements."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def left(self) -> bool:
        """Return whether any time is left."""
        return time.monotonic() < self._end

    def most(self, seconds: float) -> float:
        """Return `seconds`, or the time left if that is less, but at least one second."""
        return max(min(seconds, self._end - time.monotonic()), 1.0)
