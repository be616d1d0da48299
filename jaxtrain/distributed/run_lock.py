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
from jaxtrain.errors import say

PATIENCE_S = 120.0  # how long to wait for a run that is ending, which may still be writing a checkpoint
_TICK_S = 0.5


@contextlib.contextmanager
def run_lock(workdir: str | Path) -> Iterator[None]:
    """Lock `workdir` so that no other run trains in it; process 0 locks it for all of this run's processes.

    Raises:
        RunExit: another run held the lock for longer than `PATIENCE_S`; it may have ended by the next start.
    """
    from jaxtrain.distributed.coordination import exchange  # imports JAX, which `locked` does without

    with contextlib.ExitStack() as held:
        other = exchange(None, lambda _: held.enter_context(locked(workdir, PATIENCE_S)))
        if other:
            raise exit_codes.RunExit(exit_codes.RESTART, f"--workdir: another run is using {workdir} ({other}); end "
                                     "that one, wait for it, or give another folder")
        yield


@contextlib.contextmanager
def locked(workdir: str | Path, patience: float) -> Iterator[str]:
    """Lock `workdir` within this context; yields "", or the holder if it is still locked after this many seconds."""
    files, other = [], ""
    try:
        files.append(os.open(Path(workdir) / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        files.append(os.open(workdir, os.O_RDONLY | os.O_CLOEXEC))
        other = _try(*files)
        if other and patience:
            say(f"another run is using {workdir} ({other}); waiting up to {patience:.0f} s for it to end")
        until = time.monotonic() + patience
        while other and time.monotonic() < until:
            time.sleep(_TICK_S)
            other = _try(*files)
    except OSError as error:
        say(f"{workdir} cannot be locked ({error.strerror}), so a second run in it would not be detected")
    try:
        yield other
    finally:
        for file in files:
            os.close(file)


def _try(file: int, folder: int) -> str:
    """Try to take the lock; return "" on success, else the holder.

    The folder is locked too, where its file system can do that (NFS cannot), since the lock file may be deleted.
    """
    for handle in (file, folder):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            name = os.pread(file, 255, 0).decode(errors="replace").strip()
            return name or "a process that has just begun, or whose lock file was deleted"
        except OSError:
            if handle == file:
                raise
    with contextlib.suppress(OSError):  # on a full disk the lock has no name in it
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return ""
