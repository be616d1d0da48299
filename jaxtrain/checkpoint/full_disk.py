"""The reason that is given for a save that met a full disk."""

import contextlib
import errno
import os
import shutil
from pathlib import Path

from jaxtrain.checkpoint.step_folders import TEMPORARY

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def why_not_written(directory: Path, step: int, wanted: int, reason: str) -> str:
    """Return why a save failed in the middle; where the disk or a quota is full, with the bytes needed and free.

    What the failed save itself has written counts as free, because it is about to be deleted.
    """
    full = next((os.strerror(code) for code in _NO_ROOM if os.strerror(code) in reason), None)
    if full is None:
        return reason
    reason = reason[reason.index(full):]  # which process it was, or which file, may follow
    with contextlib.suppress(OSError):
        files = [file for entry in directory.glob(f"{step}{TEMPORARY}*") for file in entry.rglob("*")]
        free = shutil.disk_usage(directory).free + sum(512 * file.lstat().st_blocks for file in files)
        return f"{reason}: {wanted:,} bytes are needed, and {free:,} are free"
    return f"{reason}: {wanted:,} bytes are needed"
