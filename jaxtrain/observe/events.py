"""The event log WORKDIR/events.jsonl: one line for each notable decision or failure, from any process."""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.errors import say
from jaxtrain.files.bounded_files import json_lines
from jaxtrain.redaction import redacted

Event = dict[str, Any]
listeners: list[Callable[[Event], None]] = []  # of this process's events, whether or not they could be written


def record(workdir: str | Path, kind: str, **fields: object) -> None:
    """Append one event; each is a single append write, so that lines of several processes do not mix.

    With a full disk or a missing folder the event is lost, but no error is raised.
    """
    event = {"time": time.time(), "kind": kind, "process": _process(), "host": socket.gethostname(), **redacted(fields)}
    for listener in listeners:
        listener(event)
    with contextlib.suppress(OSError):
        file = os.open(Path(workdir) / "events.jsonl", os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            size = os.fstat(file).st_size
            torn = size and os.pread(file, 1, size - 1) != b"\n"  # the disk filled up in the middle of a line
            os.write(file, b"\n" * bool(torn) + json.dumps(event, default=str).encode() + b"\n")
        finally:
            os.close(file)


def tell(workdir: str | Path, kind: str, sentence: str, **fields: object) -> None:
    """Append one event and print a sentence about it, if there is one."""
    record(workdir, kind, **fields)
    if sentence:
        say(sentence)


def events(workdir: str | Path) -> list[Event]:
    """Return all events whose lines are whole: a kill or a full disk may have torn some, and the log may be gone."""
    return list(json_lines(Path(workdir) / "events.jsonl", {"kind": str}))


def _process() -> int:
    """Return this process's rank without initializing a backend or importing JAX, which the supervisor lacks."""
    jax = sys.modules.get("jax")
    return (jax._src.distributed.global_state.process_id or 0) if jax else 0
