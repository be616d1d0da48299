"""The JobSet of a job: one Indexed Job whose pods are the processes of the run.

Exit statuses become what Kubernetes does next. A pod that saved (75) or gave up to be started again (76), or that was
evicted, is made anew and counts as nothing; its peers end with 76 and are made anew too. A crash ends the Job, and the
JobSet makes all its pods anew, `retries` times. A mistake (2), a limit (77) and Ctrl-C (130) end the JobSet. At the
time limit all pods save and begin again. A run without new steps ends itself (restarts/idle_starts.py).
"""

from typing import Any

import yaml

from jaxtrain.base.annotations import JsonObject
from jaxtrain.distributed import exit_codes
from jaxtrain.launch.job_record import Job
from jaxtrain.launch.job_spec import JobSpec
from jaxtrain.launch.restarts import idle_starts

PORT = 8476  # of the first process; each pod has an address of its own, so that jobs share no ports
NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"  # of every pod
METRICS = "jaxtrain/metrics"  # the label of pods that answer Prometheus (deploy/prometheus/service-monitor.yaml)
FOLDER = "jaxtrain/folder"  # the annotation that says where the job's record is
INDEX = "batch.kubernetes.io/job-completion-index"  # the annotation of a pod that numbers it
_RUN = "run"  # the name of the replicated job and of its container


def object_name(job: Job) -> str:
    """Return the name of a job's JobSet; the next job of the workdir gets another."""
    return f"{job.name}-{job.folder.name}"


def longest_pod_name(job: Job) -> str:
    """Return the longest name that a pod gets, which Kubernetes limits."""
    return f"{object_name(job)}-{_RUN}-0-{pods(job.spec) - 1}-abcde"


def pods(spec: JobSpec) -> int:
    """Return how many pods a job has: one for each process, and by default one process for each machine.

    GPUs of one machine reach each other over NVLink within a pod only, and a host of a TPU slice has one process.
    """
    return spec.nodes * _on_a_node(spec)


def on_tpu(spec: JobSpec) -> bool:
    """Return whether the accelerators are a TPU's."""
    return spec.accelerator.startswith("tpu")


def jobset(job: Job) -> JsonObject:
    """Return the JobSet of a job."""
    spec = job.spec
    metadata: dict[str, Any] = {"name": object_name(job), "annotations": {FOLDER: f"{job.folder}"}}
    labels = {"kueue.x-k8s.io/queue-name": spec.queue, "kueue.x-k8s.io/priority-class": spec.priority}
    if spec.queue:
        metadata["labels"] = {name: value for name, value in labels.items() if value}
    if on_tpu(spec):  # the whole slice for this job
        metadata["annotations"]["alpha.jobset.sigs.k8s.io/exclusive-topology"] = "cloud.google.com/gke-nodepool"
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata,
        "spec": {
            **({"suspend": True} if spec.queue else {}),  # until Kueue admits it
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {
                "maxRestarts": spec.retries, "restartStrategy": "BlockingRecreate",  # one attempt at a time
                "rules": [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                          {"name": "time", "action": "RestartJobSetAndIgnoreMaxRestarts",
                           "onJobFailureReasons": ["DeadlineExceeded"]}]},
            "replicatedJobs": [{"name": _RUN, "replicas": 1, "template": {"spec": _job(job)}}]}}


def _job(job: Job) -> JsonObject:
    spec = job.spec
    final = sorted(code for code in exit_codes.FINAL if code)
    return {
        "completionMode": "Indexed", "completions": pods(spec), "parallelism": pods(spec),
        **({"activeDeadlineSeconds": spec.seconds - spec.grace_s} if spec.time else {}),  # the rest is for saving
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [
            {"action": "FailJob", "onExitCodes": {"containerName": _RUN, "operator": "In", "values": final}},
            {"action": "Ignore", "onExitCodes": {"containerName": _RUN, "operator": "In",
                                                 "values": [exit_codes.SAVED, exit_codes.RESTART]}},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]},
        "template": _pod(job)}


def _pod(job: Job) -> JsonObject:
    spec = job.spec
    selector = dict(line.split("=", 1) for line in spec.extra)
    if on_tpu(spec):
        selector |= {"cloud.google.com/gke-tpu-accelerator": spec.accelerator,
                     "cloud.google.com/gke-tpu-topology": spec.topology}
    elif spec.accelerator:
        selector["nvidia.com/gpu.product"] = spec.accelerator
    volumes = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]  # /dev/shm is 64 MB otherwise
    paths = ["/dev/shm"]
    for number, (path, what) in enumerate(spec.mounts.items()):
        volumes.append({"name": f"mount-{number}", **_volume(what)})
        paths.append(path)
    metadata: dict[str, Any] = {} if spec.preemptible else {"annotations": {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}}
    if metrics_port(job):
        metadata["labels"] = {METRICS: "true"}
    return {**({"metadata": metadata} if metadata else {}), "spec": {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": spec.grace_s,
        "automountServiceAccountToken": False,  # a run has nothing to say to Kubernetes
        **({"serviceAccountName": spec.account} if spec.account else {}),  # by which buckets know it
        **({"nodeSelector": selector} if selector else {}),
        "containers": [_container(job, [{"name": volume["name"], "mountPath": path}
                                        for volume, path in zip(volumes, paths, strict=True)])],
        "volumes": volumes}}


def _container(job: Job, mounts: list[dict[str, str]]) -> JsonObject:
    spec, command = job.spec, list(job.command)
    if spec.setup:
        command = ["bash", "-c", "\n".join([*spec.setup, 'exec "$@"']), _RUN, *command]
    return {"name": _RUN, "image": spec.image, "command": [_literal(word) for word in command],
            **({"workingDir": job.directory} if is_mounted(job.directory, spec) else {}),  # else the image's
            **({"ports": [{"name": "metrics", "containerPort": port}]} if (port := metrics_port(job)) else {}),
            "env": _environment(job), **_resources(spec), "volumeMounts": mounts}


def metrics_port(job: Job) -> int:
    """Return at which port each pod answers Prometheus; 0: at none."""
    return job.about.get("metrics_port", 0)


def _environment(job: Job) -> list[JsonObject]:
    name, spec = object_name(job), job.spec
    found: list[dict[str, Any]] = [
        {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{name}-{_RUN}-0-0.{name}:{PORT}"},
        {"name": "JAX_NUM_PROCESSES", "value": f"{pods(spec)}"},
        {"name": "JAX_PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}},
        {"name": "PYTHONUNBUFFERED", "value": "1"}]
    counting = idle_starts.variables(job)
    found += [{"name": variable, "value": _literal(value)} for variable, value in counting.items()]
    found += [{"name": variable, "value": _literal(value)} for variable, value in spec.env.items()]
    for variable, where in spec.secrets.items():
        secret, key = where.removeprefix("secret:").split("/")
        found.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return found


def _resources(spec: JobSpec) -> JsonObject:
    each = _on_a_node(spec)
    wanted = {"cpu": f"{spec.cpus_per_process}" if spec.cpus_per_process else "",
              "memory": f"{spec.memory_gb * 1000 / each:.0f}M" if spec.memory_gb else ""}
    kind = "google.com/tpu" if on_tpu(spec) else "nvidia.com/gpu"
    limits = {kind: f"{spec.accelerators_per_node // each}"} if spec.accelerators_per_node else {}
    found = {"requests": {name: value for name, value in (wanted | limits).items() if value}, "limits": limits}
    return {"resources": {name: value for name, value in found.items() if value}} if found["requests"] else {}


def _volume(what: str) -> JsonObject:
    if what.startswith("pvc:"):
        return {"persistentVolumeClaim": {"claimName": what.removeprefix("pvc:")}}
    return {"hostPath": {"path": what, "type": "Directory"}}


def is_mounted(path: str, spec: JobSpec) -> bool:
    """Return whether a path is on what is mounted."""
    return any(f"{path}/".startswith(f"{mount.rstrip('/')}/") for mount in spec.mounts)


def as_yaml(content: JsonObject) -> str:
    """Return YAML in the order of the keys, with texts of several lines as such."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=10000, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writes lines as lines."""

    def ignore_aliases(self, data):
        return True


_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar(
    "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None))


def _literal(text: str) -> str:
    """Return a text that Kubernetes leaves as it is, where it would put in variables for $(NAME)."""
    return text.replace("$", "$$")


def _on_a_node(spec: JobSpec) -> int:
    return spec.processes_per_node or 1
