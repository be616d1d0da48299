"""Jobs on a Ray cluster, by its Jobs API: a driver in the cluster starts the processes (ray_driver.py).

The dashboard's address is RAY_ADDRESS, such as http://head:8265; a job remembers that of its cluster. The folder of the
job must be seen by all machines: the driver reads there whether to pause, and says there what it does.
"""

import importlib
import json
import os
import secrets
import shlex
import sys
from dataclasses import replace
from typing import Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.distributed import exit_codes
from jaxtrain.errors import UserError, install_extra
from jaxtrain.files import atomic_files
from jaxtrain.launch.job_engines import refuse_running, refuse_unread
from jaxtrain.launch.job_record import Job, Status
from jaxtrain.launch.local_engine import LocalEngine
from jaxtrain.launch.ray_driver import ENDED, PLAN, STATE
from jaxtrain.launch.restarts import idle_starts

_DRIVER = "driver.sh"
_INSTEAD = {  # of keys that Ray has no place for
    "image": "start the cluster's nodes in that image (image_uri or docker in its cluster config), or use setup",
    "mounts": "mount the folders on the cluster's nodes",
    "queue": "a Ray cluster has one queue; submit to another cluster with RAY_ADDRESS",
    "account": "leave it out: who pays is settled where the cluster is started",
    "priority": "leave it out: Ray starts jobs in the order in which their machines are free",
    "topology": "set accelerator and accelerators_per_node to those of the slice's hosts",
    "time": "end the job yourself: jaxtrain jobs cancel WORKDIR",
    "min_nodes": "pause the job, and resume it on fewer: jaxtrain jobs resume WORKDIR --nodes=N",
    "notify": "watch it: jaxtrain jobs logs WORKDIR --follow",
    "preemptible": "leave it out: Ray does not preempt",
    "extra": "set accelerator, cpus_per_process or memory_gb, which choose the machines"}


class RayEngine:
    """A Ray cluster."""

    name = "ray"

    def check(self, job: Job) -> None:
        """Refuse a job that it cannot run."""
        refuse_unread(job, *_INSTEAD, instead=_INSTEAD)
        if wrong := next((v for v, where in job.spec.secrets.items() if not where.startswith("file:")), None):
            raise UserError(f"secrets.{wrong}", "Ray keeps no secrets", "give file:PATH, which all nodes can read")

    def render(self, job: Job) -> dict[str, str]:
        """Return the script of each process, that of the driver, and what the driver reads."""
        spec = job.spec
        here = {"CPU": float((spec.cpus_per_process or 1) * spec.processes)}
        if spec.accelerators_per_node:
            tpu = spec.accelerator.lower().startswith("tpu")
            here["TPU" if tpu else "GPU"] = float(spec.accelerators_per_node)
            if spec.accelerator:
                here[f"accelerator_type:{spec.accelerator}"] = 0.001
        if spec.memory_gb:
            here["memory"] = spec.memory_gb * 1e9
        plan = {"nodes": spec.nodes, "processes": spec.processes, "node": here, "retries": spec.retries,
                "grace_s": spec.grace_s, "counted": idle_starts.counted(job)}
        python = "python" if spec.setup else sys.executable  # setup may activate an environment
        lines = ["#!/bin/bash", f"exec >> {shlex.quote(f'{job.output}')} 2>&1",
                 f"cd {shlex.quote(job.directory)} || exit 2", *spec.setup,
                 f"exec {shlex.quote(python)} -m jaxtrain.launch.ray_driver {shlex.quote(f'{job.folder}')}"]
        return {**LocalEngine().render(job), _DRIVER: "\n".join(lines) + "\n", PLAN: json.dumps(plan, indent=1)}

    def submit(self, job: Job) -> str:
        """Submit the driver; return the name of the job in Ray, and where Ray is."""
        address = _address()
        for name in (ENDED, STATE):
            (job.folder / name).unlink(missing_ok=True)
        name = f"{job.name}-{secrets.token_hex(4)}"
        _client(address).submit_job(entrypoint=_entrypoint(job), submission_id=name)
        return f"{name}:{address}"

    def find(self, job: Job) -> str:
        """Return the name of a job that was not recorded, and where Ray is; "": it has none."""
        address = _address()
        return next((f"{one.submission_id}:{address}" for one in _client(address).list_jobs()
                     if one.entrypoint == _entrypoint(job)), "")

    def status(self, job: Job) -> Status:
        """Return what became of a job."""
        stopped = job.pause_file.read_text() if job.pause_file.exists() else ""
        if (ended := _read(job, ENDED)) is not None:
            return _ended(int(ended["status"]), stopped)
        name, _, address = job.id.partition(":")
        try:
            state = _client(address).get_job_status(name).value
        except UserError as error:
            return Status("unknown", error.reason)
        except RuntimeError:
            return Status("failed", "Ray does not know it any more")
        if state == "STOPPED":
            return Status("cancelled", "it was stopped at once")
        if state in ("FAILED", "SUCCEEDED"):
            return Status("failed", f"its driver was lost: see {job.output}, or ray job logs {name}")
        now = _read(job, STATE) or {"state": "waiting", "detail": "Ray starts its driver", "nodes": ""}
        return Status(now["state"], now["detail"], now["nodes"])

    def why(self, job: Job) -> str:
        """Return why a job does not run, in a sentence."""
        return self.status(job).sentence()

    def pause(self, job: Job) -> None:
        """Have a job save and stop; what it had is free for others."""
        self._tell(job, "pause")

    def resume(self, job: Job, nodes: int | None) -> str:
        """Submit the job again, on another number of nodes if one is given; return its name."""
        if (status := self.status(job)).state in ("running", "waiting"):
            refuse_running(job, status.state, nodes)
        if status.state == "unknown":
            raise UserError("WORKDIR", f"it is not known whether its job runs: {status.detail}", "try it again later")
        if nodes is not None:
            plan = json.loads(self.render(replace(job, spec=replace(job.spec, nodes=nodes)))[PLAN])
            atomic_files.write_json(job.folder / PLAN, plan)
        job.pause_file.unlink(missing_ok=True)
        return self.submit(job)

    def cancel(self, job: Job, now: bool) -> None:
        """End a job: once it has saved, or at once."""
        if self.status(job).state == "paused":  # nothing of it runs
            job.pause_file.write_text("cancel")
            return
        self._tell(job, "cancel")
        if now:
            name, _, address = job.id.partition(":")
            _client(address).stop_job(name)

    def requeue(self, job: Job) -> None:
        """Have a job save, stop and start again."""
        self._tell(job, "requeue")

    def _tell(self, job: Job, what: str) -> None:
        if self.status(job).state not in ("running", "waiting"):
            raise UserError("WORKDIR", f"the job of {job.workdir} does not run", "see jaxtrain jobs show WORKDIR")
        atomic_files.write(job.pause_file, what)


def _ended(code: int, stopped: str) -> Status:
    """Return what a job is whose driver ended with a status, and which was told to stop in a way."""
    known = "done" if code == exit_codes.DONE else "failed"
    if stopped == "cancel" and known == "failed":
        known = "cancelled"
    elif code == exit_codes.SAVED or (stopped == "pause" and code not in exit_codes.FINAL):
        known = "paused"
    return Status(known, exit_codes.words(code))


def _address() -> str:
    """Return where Ray is."""
    return os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or "http://127.0.0.1:8265"


def _entrypoint(job: Job) -> str:
    return f"bash {shlex.quote(f'{job.folder / _DRIVER}')}"


def _client(address: str) -> Any:
    """Return a client of the Jobs API."""
    try:
        submission = importlib.import_module("ray.job_submission")
    except ImportError as error:
        raise UserError("--on", "ray is not installed", install_extra("ray")) from error
    try:
        return submission.JobSubmissionClient(address if "://" in address else f"http://{address}")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError("RAY_ADDRESS", f"no Ray answers at {address} ({' '.join(f'{error}'.split())[:200]})",
                        "set it to that of the dashboard, such as http://head:8265") from error


def _read(job: Job, name: str) -> JsonObject | None:
    try:
        return json.loads((job.folder / name).read_text())
    except (OSError, ValueError):
        return None
