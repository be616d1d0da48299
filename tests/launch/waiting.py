"""Wait for what a job does, however slow the machine is."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.launch import job_record
from jaxtrain.launch.job_engines import engine_of

LIMIT = 300  # seconds, of a machine that is very slow


def wait_for(is_so: Callable[[], Any], told: Callable[[], Any] = lambda: "") -> None:
    """Wait until it is so, and look ever less often, for that may start a process; `told`: if it never is."""
    end, pause = time.monotonic() + LIMIT, 0.05
    while not is_so():
        assert time.monotonic() < end, told()
        time.sleep(pause)
        pause = min(1.1 * pause, 0.5)


def event(path: Path) -> None:
    """Wait for a file that a job writes into its workdir."""
    def told():
        log = path.parent / "jobs" / "1" / "output.log"
        return (f"{path} never came: {[each.name for each in path.parent.iterdir()]}", status_of(path.parent),
                log.read_text() if log.exists() else "")

    wait_for(path.exists, told)


def all_began(workdir: Path, attempt: int = 0) -> None:
    """Wait for all processes of the program: one that is told to stop before it can save only ends."""
    event(first := workdir / f"began-{attempt}-0")
    for rank in range(int(first.read_text().split()[0])):
        event(workdir / f"began-{attempt}-{rank}")


def status_of(workdir: Path) -> job_record.Status:
    """Return what the engine says of the job of a workdir."""
    job = job_record.newest(workdir)
    return engine_of(job.engine).status(job)


def until(workdir: Path, is_so: Callable[[job_record.Status], Any]) -> job_record.Status:
    """Wait until the engine says so of the job of a workdir, and return what it said."""
    said = [status_of(workdir)]

    def now() -> Any:
        said[0] = status_of(workdir)
        return is_so(said[0])

    wait_for(now, lambda: said[0])
    return said[0]
