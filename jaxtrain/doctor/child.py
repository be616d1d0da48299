"""What might hang or crash runs in a process of its own, which says what it measured as it goes: JSON, line by line."""

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

from jaxtrain.distributed.child_processes import die_with_parent

Measured = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What a child said before it ended, and how it ended."""

    measured: Measured
    end: str  # "" if all went well
    stderr: str = ""


def say(**measured: Any) -> None:
    """In the child: so much is known, whatever happens next."""
    print(json.dumps(measured), flush=True)


def run(module: str, *args: str, seconds: float, environment: Mapping[str, str] | None = None) -> Outcome:
    """Run jaxtrain.doctor.MODULE; end it, with all that it started, behind so many seconds."""
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
    """Not for ever: one that waits for a file system that is gone cannot even be killed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2)


def _content(file: Any) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _objects(text: str) -> Measured:
    """All that was said, as one; libraries may print what they like in between."""
    found: Measured = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            if isinstance(said := json.loads(line), dict):
                found |= said
    return found


class Budget:
    """So many seconds, for whoever measures until then."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def left(self) -> bool:
        """Whether there are any."""
        return time.monotonic() < self._end

    def most(self, seconds: float) -> float:
        """So many, or as many as are left; one in any case."""
        return max(min(seconds, self._end - time.monotonic()), 1.0)
