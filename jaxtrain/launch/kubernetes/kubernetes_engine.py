"""Jobs in Kubernetes, by kubectl: JobSets, and the queues of Kueue where there are any."""

import itertools
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from jaxtrain.base.annotations import JsonObject
from jaxtrain.distributed import exit_codes
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.launch.job_engines import refuse_unmounted, refuse_unread
from jaxtrain.launch.job_record import Job, Status, quoted
from jaxtrain.launch.kubernetes import jobset
from jaxtrain.launch.restarts import first_failure

FILE = "jobset.yaml"
_LABEL = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?=[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_KEY = re.compile(r"[-._a-zA-Z0-9]+")


class KubernetesEngine:
    """Kubernetes with JobSet; a job's id is NAMESPACE/NAME, in the cluster that kubectl speaks to."""

    name = "kubernetes"

    def check(self, job: Job) -> None:
        """Refuse a job that it cannot run."""
        spec = job.spec
        refuse_unread(job, "notify", *(() if spec.queue else ("priority",)))
        if not spec.image:
            raise UserError("image", "there is none, and pods are containers", "give one (docs/launch-kubernetes.md)")
        if spec.min_nodes not in (0, spec.nodes):
            raise UserError("min_nodes", "a JobSet has all its pods or none", "leave it out")
        if not job.name[0].isalpha():
            raise UserError("name", f"{job.name!r} does not begin with a letter", "set name")
        if (over := len(jobset.longest_pod_name(job)) - 63) > 0:
            raise UserError("name", f"{job.name!r} is {over} letters too long for the names of its pods",
                            "set a shorter name")
        if jobset.on_tpu(spec) and (not spec.topology or spec.processes_per_node > 1):
            key = "processes_per_node" if spec.topology else "topology"
            raise UserError(key, "a slice of a TPU has a topology and one process on each host",
                            "set it, such as 2x2x4" if key == "topology" else "leave it out")
        if spec.account and not _OBJECT.fullmatch(spec.account):
            raise UserError("account", f"{spec.account!r} is not the name of a service account", "correct it")
        for variable, where in spec.secrets.items():
            name, _, key = where.removeprefix("secret:").partition("/")
            if not (where.startswith("secret:") and _OBJECT.fullmatch(name) and _KEY.fullmatch(key)):
                raise UserError(f"secrets.{variable}", "pods read secrets of Kubernetes",
                                "give secret:NAME/KEY, made by kubectl create secret generic NAME --from-file=KEY=PATH")
        for path, what in spec.mounts.items():
            if not what.startswith("/") and not (what.startswith("pvc:") and _OBJECT.fullmatch(what[4:])):
                raise UserError(f"mounts.{path}", f"{what!r} is neither a claim nor a folder of the machines",
                                "give pvc:NAME or /PATH")
        if wrong := next((line for line in spec.extra if not _LABEL.fullmatch(line)), None):
            raise UserError("extra", f"{wrong!r} is not LABEL=VALUE of machines that it may run on", "correct it")
        refuse_unmounted(job)

    def render(self, job: Job) -> dict[str, str]:
        """Return the files of a job."""
        return {FILE: jobset.as_yaml(jobset.jobset(job))}

    def rehearse(self, job: Job) -> str:
        """Return that the cluster would take a job, which it may refuse, or why it was not asked; "": no kubectl here.
        """
        if shutil.which("kubectl") is None:
            return ""
        try:
            _kubectl("create", "--dry-run=server", "--validate=strict", "--filename=-", given=self.render(job)[FILE])
        except UserError as error:
            if re.search("connect|refused|no configuration|provide credentials|no answer", error.reason):
                return f"not shown to a cluster: {error.reason}"
            raise
        return "the cluster would take it"

    def submit(self, job: Job) -> str:
        """Submit a job, whose files are there, and return its name; a JobSet of the same name is left alone."""
        made = json.loads(_kubectl("create", "--filename", f"{job.folder / FILE}", "--output=json"))["metadata"]
        return f"{made['namespace']}/{made['name']}"

    def find(self, job: Job) -> str:
        """Return the name of a job that was not recorded; "": it has none."""
        found = _kubectl("get", "jobset", jobset.object_name(job), "--ignore-not-found", "--output=json")
        made = json.loads(found)["metadata"] if found.strip() else {}
        ours = made.get("annotations", {}).get(jobset.FOLDER) == f"{job.folder}"  # or one of another workdir
        return f"{made['namespace']}/{made['name']}" if ours else ""

    def status(self, job: Job) -> Status:
        """Return what became of a job."""
        found = _get(job, "jobset", _name(job))
        if not found:
            known = "cancelled" if job.pause_file.exists() else "unknown"
            return Status(known, "the cluster has no such JobSet")
        for condition in found.get("status", {}).get("conditions", []):
            if condition["type"] in ("Completed", "Failed") and condition["status"] == "True":
                return Status("done" if condition["type"] == "Completed" else "failed", condition.get("message", ""))
        if found["spec"].get("suspend"):
            return Status("paused") if job.pause_file.exists() else Status("waiting", "suspended")
        if any(one.get("ready") for one in found.get("status", {}).get("replicatedJobsStatus", [])):
            nodes = sorted({pod["spec"].get("nodeName", "") for pod in _pods(job)} - {""})
            return Status("running", nodes=",".join(nodes))
        return Status("waiting", "not all of its pods run")

    def restarts(self, job: Job) -> tuple[int, str]:
        """Return how often pods of a job were made anew, as far as the cluster knows, and why the last time."""
        found = _get(job, "jobset", _name(job)) or {}
        ends = []  # of pods that are still there, as (time, process, exit status)
        for pod in _pods(job):
            process = pod.get("metadata", {}).get("annotations", {}).get(jobset.INDEX, "0")
            for one in pod.get("status", {}).get("containerStatuses", []):
                if ended := one.get("state", {}).get("terminated"):
                    ends.append((ended.get("finishedAt") or "", int(process), ended.get("exitCode", 0)))
        failed = [(process, status) for _, process, status in sorted(ends) if status]
        again = itertools.takewhile(lambda one: one[1] in (exit_codes.SAVED, exit_codes.RESTART), failed)
        anew = Counter(process for process, _ in again)
        process, status = first_failure.of_job(failed) or (None, 0)
        return (found.get("status", {}).get("restarts", 0) + max(anew.values(), default=0),
                "" if process is None else f"process {process} {exit_codes.words(status)}")

    def why(self, job: Job) -> str:
        """Return why a job does not run, in a sentence."""
        status = self.status(job)
        if status.state == "paused":
            return "it is paused: jaxtrain jobs resume WORKDIR"
        if status.state != "waiting":
            return status.sentence()
        return (_why_queued(job) if status.detail == "suspended" else "") or _why_pending(job) or status.detail

    def pause(self, job: Job) -> None:
        """Have a job save and stop; Kueue then gives its machines to the next one."""
        _hold(job, True)
        job.pause_file.write_text("pause")

    def resume(self, job: Job, nodes: int | None) -> str:
        """Let a paused job go on; with another number of nodes, as a new JobSet of the same name."""
        if nodes is None:
            _hold(job, False)
            job.pause_file.unlink(missing_ok=True)
            return job.id
        job = replace(job, spec=replace(job.spec, nodes=nodes))
        self.check(job)
        atomic_files.write(job.folder / FILE, self.render(job)[FILE])
        _kubectl("delete", "jobset", *_name(job), "--cascade=foreground", "--ignore-not-found",
                 seconds=job.spec.grace_s + 60)
        job.pause_file.unlink(missing_ok=True)
        return self.submit(job)

    def cancel(self, job: Job, now: bool) -> None:
        """End a job: its pods have grace_s to save, or a second."""
        _kubectl("delete", "jobset", *_name(job), "--cascade=foreground", "--wait=false")
        job.pause_file.write_text("cancel")
        if now:
            _kubectl("delete", "pods", *_selector(job), "--grace-period=1", "--wait=false")

    def requeue(self, job: Job) -> None:
        """Have a job save, stop and start again, on what it was given."""
        _kubectl("delete", "pods", *_selector(job), "--wait=false")

    def logs(self, job: Job, follow: bool) -> Iterator[str]:
        """Yield the lines that the pods of the newest attempt print."""
        words = ["kubectl", "logs", *_selector(job), "--prefix", "--tail=-1",
                 f"--max-log-requests={jobset.pods(job.spec)}", *(["--follow"] if follow else [])]
        _find()
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, errors="replace") as process:
            yield from process.stdout or ()


def _hold(job: Job, stop: bool) -> None:
    """Suspend a JobSet, or let it go on. One that Kueue manages is told so by its workload: Kueue undoes the other."""
    if not job.spec.queue:
        _kubectl("patch", "jobset", *_name(job), "--type=merge", "--patch", json.dumps({"spec": {"suspend": stop}}))
        return
    workload = _workload(job)
    if workload is None:
        raise UserError("WORKDIR", "Kueue has no workload of this job", "see jaxtrain jobs why WORKDIR")
    _kubectl("patch", "workloads.kueue.x-k8s.io", workload["metadata"]["name"], f"--namespace={_namespace(job)}",
             "--type=merge", "--patch", json.dumps({"spec": {"active": not stop}}))


def _why_queued(job: Job) -> str:
    """Return what Kueue says of a job that it has not admitted."""
    if not job.spec.queue:
        return "somebody has suspended it: jaxtrain jobs resume WORKDIR"
    workload = _workload(job)
    if workload is None:
        return f"Kueue has not taken it: is there a local queue {job.spec.queue!r} in {_namespace(job)}?"
    found = {one["type"]: one for one in workload.get("status", {}).get("conditions", [])}
    said = [found[kind] for kind in ("QuotaReserved", "Admitted") if kind in found and found[kind]["status"] != "True"]
    said += [found["Evicted"]] if found.get("Evicted", {}).get("status") == "True" else []
    return "; ".join(f"{one.get('message', '')} ({one.get('reason', '')})" for one in said)


def _why_pending(job: Job) -> str:
    """Return what keeps a pod from running."""
    for pod in _pods(job):
        status = pod.get("status", {})
        for one in status.get("conditions", []):
            if one["type"] == "PodScheduled" and one["status"] == "False":
                return f"{one.get('message', '')} ({one.get('reason', '')})"
        for one in status.get("containerStatuses", []):
            if waiting := one.get("state", {}).get("waiting"):
                return f"{waiting.get('message') or 'a pod is not ready'} ({waiting.get('reason', '')})"
    return ""


def _workload(job: Job) -> JsonObject | None:
    """Return Kueue's workload of a job."""
    for one in (_get(job, "workloads.kueue.x-k8s.io") or {}).get("items", []):
        owners = one["metadata"].get("ownerReferences", [])
        if any((owner["kind"], owner["name"]) == ("JobSet", job.id.partition("/")[2]) for owner in owners):
            return one
    return None


def _pods(job: Job) -> list[JsonObject]:
    return (_get(job, "pods", _selector(job)) or {}).get("items", [])


def _get(job: Job, kind: str, which: tuple[str, ...] = ()) -> JsonObject | None:
    """Return objects as Kubernetes has them; None: there is none of the name."""
    found = _kubectl("get", kind, *(which or (f"--namespace={_namespace(job)}",)), "--ignore-not-found",
                     "--output=json")
    return json.loads(found) if found.strip() else None


def _name(job: Job) -> tuple[str, ...]:
    namespace, _, name = job.id.partition("/")
    return name, f"--namespace={namespace}"


def _selector(job: Job) -> tuple[str, ...]:
    namespace, _, name = job.id.partition("/")
    return f"--selector={jobset.NAME_LABEL}={name}", f"--namespace={namespace}"


def _namespace(job: Job) -> str:
    return job.id.partition("/")[0]


def _find() -> None:
    if shutil.which("kubectl") is None:
        raise UserError("--on", "there is no kubectl here", "install it, or show the file with --dry_run and submit it "
                        "elsewhere: kubectl create -f FILE")


def _kubectl(*words: str, seconds: int = 60, given: str = "") -> str:
    """Return what kubectl prints, which reads a text."""
    _find()
    try:
        done = subprocess.run(["kubectl", *words], capture_output=True, text=True, timeout=seconds, input=given)
    except subprocess.TimeoutExpired:
        raise UserError("kubectl", f"it gave no answer within {seconds} s",
                        "see whether the cluster can be reached: kubectl version") from None
    if done.returncode:
        said = "; ".join(line for line in done.stderr.splitlines() if line.strip()) or "it failed without a word"
        raise UserError("kubectl", said.removeprefix("error: "), _fix(said, words))
    return done.stdout


def _fix(said: str, words: tuple[str, ...]) -> str:
    if "AlreadyExists" in said:
        return "set another name"
    if "resource type" in said or "no matches for kind" in said:
        return "install JobSet in the cluster, and Kueue where there is a queue (docs/launch-kubernetes.md)"
    return f"the whole command was: {quoted(['kubectl', *words])}"
