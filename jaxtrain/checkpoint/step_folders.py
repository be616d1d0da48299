"""The folders of checkpoints: how they are renamed and deleted, and how room is made for a new one."""

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from jaxtrain.checkpoint import verify
from jaxtrain.errors import UserError

DAMAGED, ABANDONED, DELETED, MISPLACED = ".damaged", ".abandoned", ".deleted", ".misplaced"
TEMPORARY = ".orbax-checkpoint-tmp"  # as Orbax calls it
FETCHING = ".fetching"  # from the mirror
# Errors of a first save that the user has to fix.
_MISTAKES = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


def rename(folder: Path, ending: str) -> Path:
    """Rename a folder, with this ending and a number if the name is taken."""
    for number in itertools.count(1):
        to = folder.with_name(f"{folder.name.partition('.')[0]}{ending}{f'.{number}' if number > 1 else ''}")
        if not to.exists():
            return folder.rename(to)
    raise AssertionError


def delete(folder: Path) -> None:
    """Rename and delete a folder; the next save, which may run concurrently, deletes what is left of it."""
    shutil.rmtree(rename(folder, DELETED), ignore_errors=True)


def delete_rest(directory: Path) -> None:
    """Delete what a kill left of folders between their renaming and their deletion."""
    for entry in directory.glob(f"*{DELETED}*"):
        shutil.rmtree(entry, ignore_errors=True)


def delete_unfinished(directory: Path, step: int) -> None:
    """Delete what a failed save of this step left; nothing may be writing it any more."""
    for entry in directory.glob(f"{step}{TEMPORARY}*"):
        shutil.rmtree(entry, ignore_errors=True)


def prepare(directory: Path, step: int, wanted: int, *, first: bool, tell: Callable[..., None]) -> str | None:
    """Clean the directory and return None, or why `step` cannot be saved in it ("" if it is there already).

    Args:
        wanted: the bytes that will be written.
        first: whether nothing was saved in the directory so far, so that the user is to fix what is wrong with it.

    Raises:
        UserError: the first save cannot be written.
    """
    folder = directory / str(step)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if step in verify.steps(directory):
            return ""
        if os.path.lexists(folder):
            tell("checkpoint_misplaced", f"{folder} is not the folder of a checkpoint; kept as "
                 f"{rename(folder, MISPLACED)}", step=step)
        for entry in directory.iterdir():
            if TEMPORARY in entry.name or DELETED in entry.name or entry.name.endswith(FETCHING):
                shutil.rmtree(entry, ignore_errors=True)
        if os.path.lexists(left := folder.with_name(folder.name + TEMPORARY)):  # Orbax would wait for minutes
            try:
                rename(left, DELETED)
            except OSError as error:
                return f"{left.name}, left from an earlier save, cannot be deleted: {error.strerror}"
        free = shutil.disk_usage(directory).free
    except OSError as error:
        if not first or error.errno not in _MISTAKES:
            return f"{error.strerror}"  # earlier saves could be written, so later ones may be
        raise UserError("--workdir", f"{directory} cannot be written ({error.strerror})",
                        "give a folder that can be") from None
    # Compression saves little. Better not to start a save that cannot finish: one failing process delays the others.
    return f"only {free:,} bytes are free, and {wanted:,} are needed" if free < 0.8 * wanted else None
