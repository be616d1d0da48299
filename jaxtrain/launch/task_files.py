"""Jobs for SkyPilot and dstack: jaxtrain writes their task files, and people submit them.

Both bring their own machines, start one process on each of them, and start a job again by their own rules.
"""

from abc import ABC, abstractmethod

from jaxtrain.base.annotations import JsonObject
from jaxtrain.distributed import exit_codes
from jaxtrain.errors import UserError
from jaxtrain.launch.job_engines import refuse_unmounted, refuse_unread
from jaxtrain.launch.job_record import Job, Status, quoted
from jaxtrain.launch.kubernetes.jobset import PORT, as_yaml
from jaxtrain.launch.restarts import idle_starts

_BUCKETS = ("s3://", "gs://", "r2://")


class _TaskFile(ABC):
    """An engine that only writes the file, for the user to submit."""

    name = file = by_hand = ""

    def check(self, job: Job) -> None:
        """Refuse a job that its file cannot describe."""
        spec = job.spec
        refuse_unread(job, "account", "queue", "priority", "notify", "extra", "topology", "min_nodes")
        if spec.processes_per_node > 1:
            raise UserError("processes_per_node", f"jaxtrain starts one process on a machine of {self.name}",
                            "leave it out: the process uses all its accelerators")
        refuse_unmounted(job)
        self.task(job)

    def render(self, job: Job) -> dict[str, str]:
        """Return the file."""
        return {self.file: as_yaml(self.task(job))}

    @abstractmethod
    def task(self, job: Job) -> JsonObject:
        """Return what is in the file."""

    def submit(self, job: Job) -> str:
        """Refuse: people do that."""
        raise UserError("--on", f"jaxtrain does not submit to {self.name}",
                        f"write its file with --dry_run > {self.file}, and submit that: {self.by_hand}")

    def find(self, job: Job) -> str:
        """Return that nothing is known."""
        return ""

    def status(self, job: Job) -> Status:
        """Return that nothing is known."""
        return Status("unknown", f"only {self.name} knows")

    def why(self, job: Job) -> str:
        """Return that nothing is known."""
        return self.status(job).detail

    def resume(self, job: Job, nodes: int | None) -> str:
        """Refuse, as all that changes a job."""
        return self.submit(job)

    def pause(self, job: Job) -> None:
        """Refuse."""
        self.submit(job)

    def cancel(self, job: Job, now: bool) -> None:
        """Refuse."""
        self.submit(job)

    requeue = pause


class SkyPilotFile(_TaskFile):
    """SkyPilot's task, for a managed job: those are started again after a loss."""

    name, file, by_hand = "skypilot", "task.yaml", "sky jobs launch task.yaml, with --secret NAME for each secret"

    def check(self, job: Job) -> None:
        """Refuse a job that its file cannot describe."""
        super().check(job)
        refuse_unread(job, "time")
        for path, what in job.spec.mounts.items():
            if not what.startswith(_BUCKETS):
                raise UserError(f"mounts.{path}", f"{what!r} is not a bucket", f"give {', '.join(_BUCKETS)}...")

    def task(self, job: Job) -> JsonObject:
        """Return what is in the file."""
        spec = job.spec
        resources = {"accelerators": _accelerators(job), "cpus": _plus(spec.cpus_per_process),
                     "memory": _plus(spec.memory_gb), "image_id": f"docker:{spec.image}" if spec.image else "",
                     "use_spot": spec.preemptible}
        again = {"max_restarts_on_errors": spec.retries,
                 "recover_on_exit_codes": [exit_codes.SAVED, exit_codes.RESTART]}
        run = ['export JAX_COORDINATOR_ADDRESS="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)":' + f"{PORT}",
               "export JAX_NUM_PROCESSES=$SKYPILOT_NUM_NODES JAX_PROCESS_ID=$SKYPILOT_NODE_RANK",
               *spec.setup, f"exec {quoted(job.command)}"]
        return _set({
            "name": job.name, "workdir": ".", "num_nodes": spec.nodes,
            "resources": _set(resources) | {"job_recovery": again},
            "envs": dict(spec.env) | idle_starts.variables(job), "secrets": dict.fromkeys(spec.secrets),
            "file_mounts": {path: {"source": what, "mode": "MOUNT"} for path, what in spec.mounts.items()},
            "run": "\n".join(run) + "\n"})


class DstackFile(_TaskFile):
    """dstack's task; of exit statuses it tells only 0 from the others, so that it starts again what was interrupted."""

    name, file, by_hand = "dstack", "task.dstack.yml", "dstack apply -f task.dstack.yml, with its secrets in the shell"

    def check(self, job: Job) -> None:
        """Refuse a job that its file cannot describe."""
        super().check(job)
        refuse_unread(job, "retries")
        for path, what in job.spec.mounts.items():
            if ":" in what:
                raise UserError(f"mounts.{path}", f"{what!r} is neither a volume of dstack nor a folder",
                                "give NAME or /PATH")

    def task(self, job: Job) -> JsonObject:
        """Return what is in the file."""
        spec = job.spec
        resources = {"gpu": _accelerators(job), "cpu": _more(spec.cpus_per_process),
                     "memory": f"{spec.memory_gb:g}GB.." if spec.memory_gb else ""}
        run = [f'export JAX_COORDINATOR_ADDRESS="$DSTACK_MASTER_NODE_IP:{PORT}"',
               "export JAX_NUM_PROCESSES=$DSTACK_NODES_NUM JAX_PROCESS_ID=$DSTACK_NODE_RANK",
               *spec.setup, f"exec {quoted(job.command)}"]
        return _set({
            "type": "task", "name": job.name, "nodes": spec.nodes, "image": spec.image,
            "env": [*(f"{name}={value}" for name, value in (dict(spec.env) | idle_starts.variables(job)).items()),
                    *spec.secrets],
            "commands": run, "resources": _set(resources),
            "volumes": [f"{what}:{path}" for path, what in spec.mounts.items()],
            "spot_policy": "auto" if spec.preemptible else "on-demand",
            "retry": {"on_events": ["no-capacity", "interruption"]},
            "max_duration": f"{spec.seconds}s" if spec.time else "", "stop_duration": f"{spec.grace_s}s"})


def _accelerators(job: Job) -> str:
    count, kind = job.spec.accelerators_per_node, job.spec.accelerator
    if count and not kind:
        raise UserError("accelerator", "machines of a cloud are found by it", "set it, such as H100")
    return f"{kind}:{count}" if count else ""


def _plus(amount: float) -> str:
    return f"{amount:g}+" if amount else ""


def _more(amount: float) -> str:
    return f"{amount:g}.." if amount else ""


def _set(found: JsonObject) -> JsonObject:
    """Return what is not empty."""
    return {key: value for key, value in found.items() if value not in ("", [], {})}
