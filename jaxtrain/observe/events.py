"""What a person on call will want to know later: one line a decision in WORKDIR/events.jsonl, by whichever process."""

import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from jaxtrain.errors import say

Event = dict[str, Any]


def record(workdir: str | Path, kind: str, **fields: Any) -> None:
    """Append one event. Lines of several processes do not mix: each is one write to a file opened for appending.

    A full disk, or a folder that is not there, costs the event; what was to be done about it is done all the same.
    """
    event = {"time": time.time(), "kind": kind, "process": _process(), "host": socket.gethostname(), **fields}
    with contextlib.suppress(OSError):
        file = os.open(Path(workdir) / "events.jsonl", os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(file).st_size
            torn = size and os.pread(file, 1, size - 1) != b"\n"  # the disk was full in the midst of a line
            os.write(file, b"\n" * bool(torn) + json.dumps(event, default=str).encode() + b"\n")
        finally:
            os.close(file)


def tell(workdir: str | Path, kind: str, sentence: str, **fields: Any) -> None:
    """Append one event, and say it to whoever watches; without a sentence the event is enough."""
    record(workdir, kind, **fields)
    if sentence:
        say(sentence)


def events(workdir: str | Path) -> list[Event]:
    """All of them, as far as their lines are whole."""
    path = Path(workdir) / "events.jsonl"
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # torn by a kill or a full disk
    return found


def _process() -> int:
    """Ours, without waking a backend that is not up; the supervisor, which records too, has not even imported JAX."""
    jax = sys.modules.get("jax")
    return (jax._src.distributed.global_state.process_id or 0) if jax else 0
