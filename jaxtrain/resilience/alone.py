"""One run in a workdir: two would write over each other's metrics and checkpoints.

The kernel holds the lock and opens it when its process ends, however it does; nothing stale remains.
"""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.errors import UserError, say
from jaxtrain.exchange import exchange

PATIENCE_S = 120.0  # for a run that is ending: it may still have a checkpoint to write
_TICK_S = 0.5


@contextlib.contextmanager
def alone(workdir: str | Path) -> Iterator[None]:
    """Within this context no other run trains in `workdir`; process 0 locks it for all of this run's processes.

    Raises:
        UserError: another one does, and did not end within `PATIENCE_S`.
    """
    with contextlib.ExitStack() as held:
        exchange(None, lambda _: held.enter_context(locked(workdir, PATIENCE_S)))
        yield


@contextlib.contextmanager
def locked(workdir: str | Path, patience: float) -> Iterator[bool]:
    """Within this context `workdir` is this process' own -> whether that is certain: some file systems have no locks.

    Raises:
        UserError: another run works in it, and did not end within `patience` seconds.
    """
    with contextlib.ExitStack() as held:
        try:
            lock = held.enter_context(open(Path(workdir) / "lock", "a+"))
            other = _try(lock)
            if other and patience:
                say(f"another run works in {workdir} ({other}); waiting up to {patience:.0f} s for it to end")
            until = time.monotonic() + patience
            while other and time.monotonic() < until:
                time.sleep(_TICK_S)
                other = _try(lock)
        except OSError as error:
            say(f"{workdir} cannot be locked ({error.strerror}); another run in it would not be noticed")
            yield False
            return
        if other:
            raise UserError("--workdir", f"another run works in {workdir} ({other})",
                            "end that one or give another folder")
        with contextlib.suppress(OSError):  # on a full disk it has no name
            lock.truncate(0)
            print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
        yield True


def _try(lock) -> str | None:
    """None: it is ours. Else whose it is."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        return lock.read().strip() or "a process that has just begun"
    return None
