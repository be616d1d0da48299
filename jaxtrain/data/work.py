"""A folder that tasks fill, from nothing to its manifest: the same for text and for anything else."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.data import engines, files, storage
from jaxtrain.data.corpus import UNFINISHED
from jaxtrain.data.engines import Engine
from jaxtrain.data.opening import read_manifest
from jaxtrain.data.progress import Progress
from jaxtrain.data.tasks import Task, read_ledger
from jaxtrain.errors import UserError

Say = Callable[[str], None]


def folder(output: str | Path) -> Path:
    """Where the corpus shall be; a URL is none, of which a path would swallow a slash."""
    if storage.is_url(output):
        raise UserError("--output", f"{output} is no folder of this machine",
                        "prepare into a folder, then send it there with jaxtrain.data.publish")
    return Path(output).expanduser()


def begin(output: Path, plan: str, format: str) -> bool:
    """Make the folder, which must hold nothing else; whether there is anything left to do."""
    if (output / "manifest.json").exists():
        if read_manifest(output, format)["plan"] != plan:
            raise UserError("--output", f"{output} holds another corpus", "name another folder, or delete it")
        shutil.rmtree(output / UNFINISHED, ignore_errors=True)  # a kill came when all was done
        return False
    if output.is_dir() and not (output / UNFINISHED).is_dir() and any(output.iterdir()):
        raise UserError("--output", f"{output} is not empty", "name another folder")
    try:
        (output / UNFINISHED).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("--output", f"{output} cannot be written ({error.strerror})", "name another folder") from error
    return True


def run(what: str, do: Callable[..., int], tasks: Sequence[Task], missing: Sequence[int], output: Path, options: Any,
        plan: str, workers: int | Engine, say: Say, ours: Sequence[int] | None = None) -> None:
    """Do the missing tasks of ours (all, if it is not said which), and tell how it goes."""
    progress = Progress(what, tasks, range(len(tasks)) if ours is None else ours, missing, say)
    for number in engines.run(do, tasks, missing, output, options, plan, workers):
        progress.add(number)


def missing(tasks: Sequence[Task], numbers: Sequence[int], output: Path, plan: str) -> list[int]:
    """Those of the tasks that are not done."""
    return [number for number in numbers if not read_ledger(output, number, tasks[number], plan)]


def ledgers(tasks: Sequence[Task], output: Path, plan: str) -> list[dict[str, Any]]:
    """Of all tasks, which are done."""
    found = [read_ledger(output, number, task, plan) for number, task in enumerate(tasks)]
    if None in found:
        raise UserError("--input", f"the input of task {found.index(None)} changed while it was read", "run again")
    return [ledger for ledger in found if ledger]


def complete(output: Path, manifest: dict[str, Any], code: dict[str, Any]) -> None:
    """Write the manifest: with it the corpus is there. `code` stands beside what identifies the data."""
    for partial in output.glob("*.partial"):  # of those who were killed
        partial.unlink()
    files.sync(output)
    files.write_json(output / "manifest.json", manifest | {"code": code, "sha256": files.digest(manifest)})
    files.sync(output)
    shutil.rmtree(output / UNFINISHED)


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
