"""The engines that run jobs: one small interface, and a registry by name."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from jaxtrain.errors import UserError, nearest
from jaxtrain.launch.job_record import Job, Status

_HOME = {"local": ("local_engine", "LocalEngine"), "slurm": ("slurm_engine", "SlurmEngine"),
         "kubernetes": ("kubernetes.kubernetes_engine", "KubernetesEngine"),
         "skypilot": ("task_files", "SkyPilotFile"), "dstack": ("task_files", "DstackFile"),
         "ray": ("ray_engine", "RayEngine")}


class Engine(Protocol):
    """Something that runs jobs. It keeps their state; nothing else does."""

    name: str

    def check(self, job: Job) -> None:
        """Refuse a job that it cannot run."""

    def render(self, job: Job) -> dict[str, str]:
        """Return the files of a job, by name."""
        ...

    def submit(self, job: Job) -> str:
        """Submit a job whose files are in its folder, and return its name there."""
        ...

    def find(self, job: Job) -> str:
        """Return the name there of a job whose submission was cut off before it was recorded; "": it has none."""
        ...

    def status(self, job: Job) -> Status:
        """Return what became of a job."""
        ...

    def why(self, job: Job) -> str:
        """Return in a sentence why a job does not run."""
        ...

    def pause(self, job: Job) -> None:
        """Have a job save and stop, until it is resumed."""

    def resume(self, job: Job, nodes: int | None) -> str:
        """Let a paused job go on, on another number of nodes if one is given; return its name."""
        ...

    def cancel(self, job: Job, now: bool) -> None:
        """End a job: once it has saved, or at once."""

    def requeue(self, job: Job) -> None:
        """Have a job save, stop and start again."""


def engine_of(name: str) -> Engine:
    """Return an engine."""
    if name not in _HOME:
        raise UserError("--on", f"{name!r} is not a known engine", nearest(name, _HOME))
    module, kind = _HOME[name]
    return getattr(importlib.import_module(f"jaxtrain.launch.{module}"), kind)()


def refuse_running(job: Job, state: str, nodes: int | None) -> None:
    """Refuse to resume a job that goes on by itself."""
    raise UserError("WORKDIR", f"its job is {state}, and continues by itself", "leave it" if nodes is None else
                    f"for other nodes pause it first: jaxtrain jobs pause {job.workdir}")


def refuse_unread(job: Job, *keys: str, instead: Mapping[str, str] = MappingProxyType({})) -> None:
    """Refuse keys of a spec that the job's engine does not read; `instead`: what to use there, by key."""
    if wrong := next((key for key in keys if key in job.spec.as_dict()), None):
        raise UserError(wrong, f"--on={job.engine} does not read it", instead.get(wrong, "leave it out"))


def refuse_unmounted(job: Job) -> None:
    """Refuse a job whose container would leave its workdir on a disk that is deleted with it."""
    if not any(job.workdir.is_relative_to(path) for path in job.spec.mounts):
        raise UserError("--workdir", f"{job.workdir} is not on a mount, and what a container writes elsewhere is lost "
                        "with it", 'mount its file system under the same path as here: [mounts] "/PATH" = "pvc:NAME"')
