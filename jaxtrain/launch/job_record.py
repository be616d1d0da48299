"""A job: what runs, where, and what its workdir says of it.

`WORKDIR/jobs/NUMBER/` has `job.json` (what was submitted, and the engine's name for it), the rendered files, the patch
of an edited checkout, and the output. The newest number is the job that counts; engines know what became of it.
"""

import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import user_json
from jaxtrain.launch.job_spec import ENGINES, JobSpec

RECORD, RESTARTS = "job.json", "restarts.jsonl"
_UNKNOWN = 100  # files that git does not know, of which names are kept at most
_FORM = {"engine": str, "id": str, "name": str, "submitted": float, "command": [str], "directory": str, "spec": dict}

IN_WORDS = {"waiting": "is waiting", "running": "is running", "paused": "is paused", "done": "has finished",
            "failed": "has failed", "cancelled": "was cancelled", "stopped": "was stopped",
            "unknown": "is in an unknown state"}


@dataclass(frozen=True)
class Job:
    """One submission."""

    folder: Path  # WORKDIR/jobs/NUMBER
    engine: str
    name: str
    command: Sequence[str]  # of each process
    directory: str  # where it starts
    spec: JobSpec
    about: Mapping[str, Any] = field(default_factory=dict)  # commit, hash of the config
    id: str = ""  # as the engine knows it
    submitted: float = 0.0

    @property
    def workdir(self) -> Path:
        """Return the run's workdir."""
        return self.folder.parent.parent

    @property
    def output(self) -> Path:
        """Return the file with what its processes print."""
        return self.folder / "output.log"

    @property
    def pause_file(self) -> Path:
        """Return the file that tells the job's script not to start again: "pause" or "cancel"."""
        return self.folder / "stop"


@dataclass(frozen=True)
class Status:
    """The status of a job, as its engine reports it."""

    state: str  # waiting, running, paused, done, failed, cancelled or unknown; to people also stopped, by a sweep
    detail: str = ""  # in the engine's words: why it waits, how it ended
    nodes: str = ""

    def sentence(self) -> str:
        """Return the status in words, as the answer to why a job does not run."""
        return f"it {IN_WORDS[self.state]}" + (f": {self.detail}" if self.detail else "")


def new_folder(workdir: Path) -> Path:
    """Make the folder of the next job of a workdir."""
    jobs = workdir / "jobs"
    try:
        jobs.mkdir(parents=True, exist_ok=True)
        while True:
            folder = jobs / f"{max([0, *_numbers(jobs)]) + 1}"
            try:
                folder.mkdir()
                return folder
            except FileExistsError:  # another one was submitted at the same moment
                continue
    except OSError as error:
        raise UserError("--workdir", f"{jobs} cannot be written ({error.strerror})", "give another") from error


def _numbers(jobs: Path) -> list[int]:
    return sorted(int(path.name) for path in jobs.iterdir() if path.name.isdecimal()) if jobs.is_dir() else []


def record(job: Job) -> None:
    """Write job.json."""
    atomic_files.write_json(job.folder / RECORD, {
        "engine": job.engine, "id": job.id, "name": job.name, "submitted": job.submitted or time.time(),
        "command": list(job.command), "directory": job.directory, "spec": job.spec.as_dict(), **job.about})


def read(folder: Path) -> Job | None:
    """Return the job of a folder; None: there is none, or its submission was cut off."""
    job = _read(folder)
    return job if job and job.id else None


def _read(folder: Path) -> Job | None:
    found = user_json(folder / RECORD, _FORM, "WORKDIR", "submit the job again")
    if found is None or found["engine"] not in ENGINES:
        return None
    about = {key: value for key, value in found.items() if key not in _FORM}
    spec: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value
                            for key, value in found["spec"].items()}
    return Job(folder, found["engine"], found["name"], found["command"], found["directory"], JobSpec(**spec), about,
               found["id"], found["submitted"])


def all_of(workdir: Path) -> list[Job]:
    """Return the jobs of a workdir, the newest one first."""
    found = (read(workdir / "jobs" / f"{number}") for number in reversed(_numbers(workdir / "jobs")))
    return [job for job in found if job]


def cut_off(workdir: Path) -> list[Job]:
    """Return the jobs of a workdir whose submission was cut off: the engine may have them, and nobody knows the name.
    """
    found = (_read(workdir / "jobs" / f"{number}") for number in reversed(_numbers(workdir / "jobs")))
    return [job for job in found if job and not job.id]


def newest(workdir: Path) -> Job:
    """Return the newest job of a workdir."""
    if found := all_of(workdir):
        return found[0]
    raise UserError("WORKDIR", f"{workdir} has no job", "submit one with jaxtrain launch")


def under(root: Path) -> Iterator[Job]:
    """Yield the newest job of each workdir under a folder, in the order of their names."""
    for jobs in sorted(root.glob("**/jobs")):
        yield from all_of(jobs.parent)[:1]


def provenance(directory: Path) -> tuple[JsonObject, str]:
    """Return the commit that a folder is a checkout of, with files that git does not know, and how it was edited since.

    Of such files only names, since there may be secrets among them. ({}, ""): it is not a checkout.
    """
    def git(*words: str) -> str:
        return subprocess.run(["git", "--no-optional-locks", "-C", str(directory), *words], capture_output=True,
                              text=True, timeout=60, check=True).stdout

    try:
        unknown = git("ls-files", "--others", "--exclude-standard", "--directory", "-z").split("\0")[:-1]
        about = {"commit": git("rev-parse", "HEAD").strip()} | ({"untracked": unknown[:_UNKNOWN]} if unknown else {})
        return about, git("diff", "--binary", "HEAD")
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return {}, ""


def quoted(words: Sequence[str]) -> str:
    """Return words as a shell reads them."""
    return shlex.join(words)


def exported(spec: JobSpec) -> list[str]:
    """Return the lines of a shell that set a job's variables, and read its secrets from their files."""
    return [*(f"export {name}={shlex.quote(value)}" for name, value in spec.env.items()),
            *(f"{name}=$(cat {_at_home(where)}) && export {name} || exit 2" for name, where in spec.secrets.items())]


def _at_home(where: str) -> str:
    """Return the path of a file with a secret as a shell reads it, whoever runs the job."""
    path = where.removeprefix("file:")
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
