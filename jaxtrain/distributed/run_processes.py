"""The processes of a run as the heartbeats in its workdir tell of them."""

import contextlib
import os
import socket
import sys
import time
from pathlib import Path

from jaxtrain.base.annotations import JsonObject
from jaxtrain.files.bounded_files import read_json

ALIVE_S = 60  # a younger heartbeat may come from a process that is still alive
_BEAT = {"step?": int, "begun?": int, "phase?": str, "time?": int | float, "pid?": int, "host?": str}


def heartbeats(workdir: str | Path) -> dict[int, JsonObject]:
    """Return the newest heartbeat of each process."""
    found = {}
    for path in (Path(workdir) / "heartbeats").glob("process-*"):
        with contextlib.suppress(OSError, ValueError):
            found[int(path.name.removeprefix("process-"))] = read_json(path, _BEAT)
    return dict(sorted(found.items()))


def alive(workdir: str | Path) -> str:
    """Return which process of the run was alive within the last minute, as a clause; "": none.

    Some file systems lock only within a machine, or never, so that the lock alone does not tell.
    """
    for process, beat in heartbeats(workdir).items():
        with contextlib.suppress(FileNotFoundError):
            age = time.time() - (Path(workdir) / "heartbeats" / f"process-{process}").stat().st_mtime
            if age < ALIVE_S and beat.get("phase") != "ended" and not _is_dead(beat):
                return f"process {process} of this run ({beat.get('host')}) was alive {max(0, age):.0f} s ago"
    return ""


def last_beat(workdir: str | Path, since: float) -> float:
    """Return when a process that has not ended since then gave its newest heartbeat; 0: none did."""
    times = (beat.get("time", 0) for beat in heartbeats(workdir).values()
             if beat.get("phase") != "ended" and not _is_dead(beat))
    return max((float(then) for then in times if since <= then <= sys.float_info.max), default=0.0)


def was_killed(workdir: str | Path, since: float) -> bool:
    """Return whether the first process, which has given a sign of life after `since`, is known to have been killed."""
    beat = heartbeats(workdir).get(0, {})
    return beat.get("time", 0) >= since and beat.get("phase") != "ended" and _is_dead(beat)


def _is_dead(beat: JsonObject) -> bool:
    """Return whether the process that wrote this heartbeat is known to be dead (unknown on another machine)."""
    if beat.get("host") != socket.gethostname():
        return False
    try:
        os.kill(beat["pid"], 0)
    except ProcessLookupError:
        return True
    except (OSError, KeyError, OverflowError):
        return False
    return False
