"""Jobs on this machine: a supervisor that goes on when the shell that started it ends."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from jaxtrain.distributed import exit_codes
from jaxtrain.errors import UserError
from jaxtrain.launch.job_engines import refuse_running, refuse_unread
from jaxtrain.launch.job_record import Job, Status, exported, quoted
from jaxtrain.launch.job_spec import JobSpec
from jaxtrain.launch.local_job import ENDED

SCRIPT = "job.sh"
_READ = ("name", "nodes", "processes_per_node", "accelerators_per_node", "accelerator", "retries", "setup", "env",
         "secrets")


class LocalEngine:
    """The engine that runs jobs on this machine."""

    name = "local"

    def check(self, job: Job) -> None:
        """Refuse a job that it cannot run."""
        if job.spec.nodes > 1:
            raise UserError("nodes", f"there are not {job.spec.nodes} machines here", "set nodes=1")
        refuse_unread(job, *(key for key in JobSpec.__dataclass_fields__ if key not in _READ))
        if job.spec.processes > 1 and "jaxtrain.supervise" not in job.command:
            raise UserError("processes_per_node", "a command of your own is one process on this machine",
                            "leave it out, or have the command start its processes")
        if wrong := next((v for v, where in job.spec.secrets.items() if not where.startswith("file:")), None):
            raise UserError(f"secrets.{wrong}", "it is a secret of Kubernetes", "give file:PATH")

    def render(self, job: Job) -> dict[str, str]:
        """Return the script that the job is."""
        lines = ["#!/bin/bash", f"cd {shlex.quote(job.directory)} || exit 2",
                 *exported(job.spec), *job.spec.setup, f"exec {quoted(job.command)}"]
        return {SCRIPT: "\n".join(lines) + "\n"}

    def submit(self, job: Job) -> str:
        """Start the job, and return the number of its process."""
        for name, where in job.spec.secrets.items():
            if not os.access(os.path.expanduser(where.removeprefix("file:")), os.R_OK):
                raise UserError(f"secrets.{name}", f"{where.removeprefix('file:')} cannot be read",
                                "name a file that can be")
        with open(job.output, "ab") as log:
            process = subprocess.Popen([sys.executable, "-m", "jaxtrain.launch.local_job", str(job.folder), SCRIPT],
                                       stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        return f"{process.pid}:{_started(process.pid)}"

    def find(self, job: Job) -> str:
        """Return the number of the process of a job that was not recorded; "": it has none."""
        wanted = b"\0".join([b"jaxtrain.launch.local_job", os.fsencode(job.folder), b""])
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if wanted in path.read_bytes():
                    return f"{path.parent.name}:{_started(int(path.parent.name))}"
        return "0:" if (job.folder / ENDED).exists() else ""

    def status(self, job: Job) -> Status:
        """Return what became of a job."""
        if _alive(job):
            return Status("running", nodes="here")
        stopped = job.pause_file.read_text() if job.pause_file.exists() else ""
        try:
            code = int((job.folder / ENDED).read_text())
        except (OSError, ValueError):
            return Status("cancelled") if stopped == "cancel" else Status(
                "failed", "was killed, or the machine was started again")
        states = {exit_codes.DONE: "done", exit_codes.SAVED: "cancelled" if stopped == "cancel" else "paused"}
        return Status(states.get(code, "failed"), exit_codes.words(code))

    def why(self, job: Job) -> str:
        """Return in a sentence why a job does not run."""
        status = self.status(job)
        return replace(status, detail=status.detail and f"it {status.detail}").sentence()

    def pause(self, job: Job) -> None:
        """Have a job save and stop."""
        self._stop(job, "pause")

    def resume(self, job: Job, nodes: int | None) -> str:
        """Start the job again; return the number of its process."""
        if nodes not in (None, 1):
            raise UserError("--nodes", f"there are not {nodes} machines here", "leave it out")
        if _alive(job):
            refuse_running(job, "running", nodes)
        for name in (job.pause_file, job.folder / ENDED):
            name.unlink(missing_ok=True)
        return self.submit(job)

    def cancel(self, job: Job, now: bool) -> None:
        """End a job: once it has saved, or at once."""
        self._stop(job, "cancel", signal.SIGKILL if now else signal.SIGTERM)

    def requeue(self, job: Job) -> None:
        """Have a job save, stop and start again."""
        raise UserError("requeue", "there is no queue on this machine", "pause the job and resume it")

    def _stop(self, job: Job, how: str, by: signal.Signals = signal.SIGTERM) -> None:
        if not _alive(job):
            raise UserError("WORKDIR", f"the job of {job.workdir} does not run", "see jaxtrain jobs show WORKDIR")
        job.pause_file.write_text(how)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(_pid(job), by) if by == signal.SIGKILL else os.kill(_pid(job), by)


def _pid(job: Job) -> int:
    return int(job.id.partition(":")[0])


def _alive(job: Job) -> bool:
    started = job.id.partition(":")[2]  # "": it had ended when it was looked for
    return started != "" and _started(_pid(job)) == started


def _started(pid: int) -> str:
    """Return when a process started, which tells it from a later one of the same number; "": there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
