"""A lock that allows one run per workdir; two would overwrite each other's metrics and checkpoints.

The kernel releases the lock when the process that holds it ends, for whatever reason, so a killed run leaves nothing
behind. (Over NFS this may take until the server notices that a machine is gone.)
"""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.distributed import exit_codes
from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import say

PATIENCE_S = 120.0  # how long to wait for a run that is ending, which may still be writing a checkpoint
_TICK_S = 0.5


@contextlib.contextmanager
def run_lock(workdir: str | Path) -> Iterator[None]:
    """Lock `workdir` so that no other run trains in it; process 0 locks it for all of this run's processes.

    Raises:
        RunExit: another run held the lock for longer than `PATIENCE_S`; it may have ended by the next start.
    """
    with contextlib.ExitStack() as held:
        other = exchange(None, lambda _: held.enter_context(locked(workdir, PATIENCE_S)))
        if other:
            raise exit_codes.RunExit(exit_codes.RESTART, f"--workdir: another run works in {workdir} ({other}); end "
                                     "that one, wait for it, or give another folder")
        yield


@contextlib.contextmanager
def locked(workdir: str | Path, patience: float) -> Iterator[str]:
    """Lock `workdir` within this context; yields "", or the holder if it is still locked after so many seconds."""
    file, other = None, ""
    try:
        file = os.open(Path(workdir) / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        other = _try(file)
        if other and patience:
            say(f"another run works in {workdir} ({other}); waiting up to {patience:.0f} s for it to end")
        until = time.monotonic() + patience
        while other and time.monotonic() < until:
            time.sleep(_TICK_S)
            other = _try(file)
    except OSError as error:
        say(f"{workdir} cannot be locked ({error.strerror}); another run in it would not be noticed")
    try:
        yield other
    finally:
        if file is not None:
            os.close(file)


def _try(file: int) -> str:
    """Try to take the lock; return "" on success, else the holder."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(file, 255, 0).decode(errors="replace").strip() or "a process that has just begun"
    with contextlib.suppress(OSError):  # on a full disk the lock has no name in it
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return ""
