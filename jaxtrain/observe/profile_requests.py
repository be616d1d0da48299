"""Ask a run for a profile of its next steps: a file in its workdir, which it looks for once a second.

    request_profile(workdir, steps=5)

The run answers with a folder WORKDIR/profiles/STEP, whose `profile.json` comes last (`trainer/capture.py`).
"""

import contextlib
import secrets
import time
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import read_json

FILE = "profile_request.json"
MOST = 1000  # steps, of which each adds megabytes to a trace, or processes
_FORM = {"id": str, "steps": int, "processes": int, "time": int | float, "first?": int}
_STALE = 600.0  # seconds after which a request that nobody answered no longer stands in the way

Request = dict[str, Any]


def request_profile(workdir: str | Path, steps: int = 5, processes: int = 8) -> str:
    """Ask the run in `workdir` to trace so many steps in its first `processes` processes; return the request's id.

    Raises:
        UserError: the number of steps is no such number, another request is not answered yet, or the workdir cannot be
            written.
    """
    for flag, count in (("--steps", steps), ("--processes", processes)):
        if not 1 <= count <= MOST:
            raise UserError(flag, f"{count} is out of range", f"give 1 to {MOST}")
    if (earlier := pending(workdir)) and time.time() - earlier["time"] < _STALE:
        raise UserError("profile", f"a profile of {earlier['steps']} steps is under way in {workdir}",
                        "wait until it is written")
    made = {"id": secrets.token_hex(8), "steps": steps, "processes": processes, "time": time.time()}
    try:
        atomic_files.write_json(Path(workdir) / FILE, made)
    except OSError as error:
        raise UserError("WORKDIR", f"{workdir} cannot be written ({error.strerror})", "give the workdir of a run"
                        ) from None
    return made["id"]


def pending(workdir: str | Path) -> Request | None:
    """Return the request in a workdir; None if there is none."""
    try:
        return read_json(Path(workdir) / FILE, _FORM, limit=2**16)
    except (OSError, ValueError):
        return None


def agree(workdir: str | Path, request: Request, first: int) -> None:
    """Tell all processes of the run that tracing begins with the step `first`."""
    atomic_files.write_json(Path(workdir) / FILE, {**request, "first": first})


def withdraw(workdir: str | Path, id: str = "") -> None:
    """Remove a request, if it still is the one with this id; any one without an id."""
    if not id or (pending(workdir) or {}).get("id") == id:
        with contextlib.suppress(OSError):
            (Path(workdir) / FILE).unlink()
