"""The output folder of a preparation, from empty to its manifest; shared by text, audio and events."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from jaxtrain import storage
from jaxtrain.base.annotations import JsonObject
from jaxtrain.data.corpus.corpus import UNFINISHED
from jaxtrain.data.corpus.open import read_manifest
from jaxtrain.data.prepare import engines
from jaxtrain.data.prepare.engines import Engine
from jaxtrain.data.prepare.prepare_progress import Progress
from jaxtrain.data.prepare.tasks import Task, read_ledger
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files, bounded_files

try:
    import fcntl
except ImportError:  # not a Unix system
    fcntl = None

Say = Callable[[str], None]
LONGEST_PLAN = 1000  # bytes; a hash has 64


def folder(output: str | Path) -> Path:
    """Return the output folder; a URL is an error, since a Path would drop one of its slashes."""
    if storage.is_url(output):
        raise UserError("--output", f"{output} is not a folder on this machine",
                        "prepare into a folder, then copy it there with jaxtrain publish")
    return Path(output).expanduser()


@contextmanager
def begun(output: Path, plan: str, format: str, alone: bool = True) -> Iterator[bool]:
    """Lock the output folder and follow the plan; yields whether there is anything left to do.

    The folder must hold nothing else. One process locks it `alone`, or several with the same plan share it. The kernel
    releases the lock if a process is killed.
    """
    while not _complete(output, plan, format):
        if output.is_dir() and not (output / UNFINISHED).is_dir() and any(output.iterdir()):
            raise UserError("--output", f"{output} is not empty", "name another folder")
        path = output / UNFINISHED / "plan"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = bounded_files.opened(path, "a+b", os.O_RDWR | os.O_APPEND | os.O_CREAT)
        except FileNotFoundError:
            continue  # another process has just finished
        except OSError as error:
            raise UserError("--output", f"{output} cannot be written ({error.strerror})", "name another folder"
                            ) from error
        with file:
            _lock(file, output, alone)
            if not _is_there(file, path) or _complete(output, plan, format):
                continue
            _follow(file, output, plan, alone)
            yield True
            return
    shutil.rmtree(output / UNFINISHED, ignore_errors=True)  # left by a kill after the manifest was written
    yield False


def _complete(output: Path, plan: str, format: str) -> bool:
    if not (output / "manifest.json").exists():
        return False
    if read_manifest(output, format).get("plan") != plan:
        raise UserError("--output", f"{output} holds another corpus", "name another folder, or delete it")
    return True


def _lock(file: BinaryIO, output: Path, alone: bool) -> None:
    """Lock the file, or continue without a lock where the system or the file system has none."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError("--output", f"another process is preparing {output}", "wait until it has ended, or name "
                        "another folder") from error
    except OSError:
        pass


def _is_there(file: BinaryIO, path: Path) -> bool:
    """Return whether the opened file has not been deleted or replaced."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _follow(file: BinaryIO, output: Path, plan: str, alone: bool) -> None:
    """Write the plan, or check the one that is written; the first line counts, because several processes may write."""
    if _first_line(file) not in ("", plan) and len(os.listdir(output / UNFINISHED)) == 1:  # no task was ever done
        _lock(file, output, True)
        file.truncate(0)
    if not _first_line(file):
        file.write(f"{plan}\n".encode())
    _lock(file, output, alone)
    if _first_line(file) != plan:
        raise UserError("--output", f"another command began in {output}, or its input has changed",
                        "delete it, or name another folder")


def _first_line(file: BinaryIO) -> str:
    file.seek(0)
    return file.readline(LONGEST_PLAN).decode(errors="replace").strip()


def run(what: str, do: Callable[..., int], tasks: Sequence[Task], missing: Sequence[int], output: Path, options: Any,
        plan: str, workers: int | Engine, say: Say, ours: Sequence[int] | None = None) -> None:
    """Do the missing tasks (of those in `ours`, or of all), and report the progress."""
    progress = Progress(what, tasks, range(len(tasks)) if ours is None else ours, missing, say, workers)
    for number in engines.run(do, tasks, missing, output, options, plan, workers):
        progress.add(number)


def missing(tasks: Sequence[Task], numbers: Sequence[int], output: Path, plan: str) -> list[int]:
    """Return the numbers of the tasks that are not done."""
    return [number for number in numbers if not read_ledger(output, number, tasks[number], plan)]


def ledgers(tasks: Sequence[Task], output: Path, plan: str) -> list[JsonObject]:
    """Return the ledgers of all tasks; every task must be done."""
    found = [read_ledger(output, number, task, plan) for number, task in enumerate(tasks)]
    if None in found:
        raise UserError("--input", f"the input of task {found.index(None)} changed while it was read", "run again")
    return [ledger for ledger in found if ledger]


def complete(output: Path, manifest: JsonObject, code: JsonObject, **beside: Any) -> None:
    """Write the manifest, which completes the corpus; `code` and `beside` are stored but do not identify the data."""
    for partial in output.glob("*.partial"):  # left by killed processes
        partial.unlink(missing_ok=True)
    atomic_files.sync(output)
    manifest = manifest | {"code": code, **beside, "sha256": atomic_files.digest(manifest)}
    atomic_files.write_json(output / "manifest.json", manifest)
    atomic_files.sync(output)
    shutil.rmtree(output / UNFINISHED, ignore_errors=True)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
