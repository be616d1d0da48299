"""Jobs in Kubernetes, with a kubectl that writes down what it is asked and answers what a cluster has answered."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from jaxtrain.commands import jobs as jobs_command
from jaxtrain.commands import launch as launch_command
from jaxtrain.launch import job_record as jobs
from jaxtrain.launch import submission as launch
from jaxtrain.launch.kubernetes import jobset
from jaxtrain.launch.kubernetes.kubernetes_engine import KubernetesEngine
from tests.launch import test_golden_jobs as golden

KUBECTL = """\
#!/bin/bash
cd {folder}
printf '%s\\n' "$*" >> calls
if [ -f "fails-$1" ]; then cat "fails-$1" >&2; exit 1; fi
cat "$1-$2" 2>/dev/null || true
"""
QUEUED = {"spec": {"suspend": True}}
ROOT = Path(__file__).parents[3]
WORKLOAD = {"items": [
    {"metadata": {"name": "other", "ownerReferences": [{"kind": "JobSet", "name": "other"}]}},
    {"metadata": {"name": "jobset-work-1-abcde", "ownerReferences": [{"kind": "JobSet", "name": "work-1"}]},
     "status": {"conditions": [
         {"type": "QuotaReserved", "status": "False", "reason": "Pending",
          "message": "couldn't assign flavors to pod set run: insufficient unused quota for nvidia.com/gpu"},
         {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "Preempted to accommodate a workload"},
     ]}}]}


class Cluster:
    """A cluster: the answers of kubectl, and the questions that it was asked."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.answer("create", "--filename", {"metadata": {"name": "work-1", "namespace": "team"}})

    def answer(self, verb: str, kind: str, content: dict) -> None:
        (self.folder / f"{verb}-{kind}").write_text(json.dumps(content))

    def jobset(self, **content) -> None:
        self.answer("get", "jobset", {"spec": {}} | content)

    def fail(self, verb: str, said: str) -> None:
        (self.folder / f"fails-{verb}").write_text(said)

    def asked(self) -> list[str]:
        """Return the changes that it was asked for since the last call."""
        calls = self.folder / "calls"
        found = [line for line in calls.read_text().splitlines() if not line.startswith("get ")]
        calls.write_text("")
        return found


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "kubectl").write_text(KUBECTL.format(folder=folder))
    (folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return Cluster(folder)


@pytest.fixture
def work(tmp_path) -> Path:
    return tmp_path / "work"


def submit(workdir: Path, *flags: str, more: str = "") -> int:
    spec = workdir.parent / "job.toml"
    spec.write_text(f'image = "jaxtrain:1"\n{more}\n[mounts]\n"{workdir.parent}" = "pvc:runs"\n')
    words = ["--on=kubernetes", f"--workdir={workdir}", f"--job={spec}", *flags]
    return launch_command.main([*words, "--", "python", "x.py"])


def status(workdir: Path) -> jobs.Status:
    return KubernetesEngine().status(jobs.newest(workdir))


def told(what: str, workdir: Path, *flags: str) -> None:
    assert jobs_command.main([what, f"{workdir}", *flags]) == 0


def test_a_job_is_submitted_paused_resumed_and_cancelled(cluster, work, capsys):
    assert submit(work, "--nodes=2") == 0
    assert cluster.asked() == [f"create --filename {work}/jobs/1/jobset.yaml --output=json"]
    assert yaml.safe_load((work / "jobs/1/jobset.yaml").read_text())["metadata"] == {
        "name": "work-1", "annotations": {"jaxtrain/folder": f"{work}/jobs/1"}}
    cluster.jobset(status={"replicatedJobsStatus": [{"name": "run", "ready": 1}]})
    cluster.answer("get", "pods", {"items": [{"spec": {"nodeName": "b"}}, {"spec": {"nodeName": "a"}}, {"spec": {}}]})
    assert status(work) == jobs.Status("running", nodes="a,b")
    told("pause", work)
    assert cluster.asked() == ['patch jobset work-1 --namespace=team --type=merge --patch {"spec": {"suspend": true}}']
    cluster.jobset(**QUEUED)
    assert status(work).state == "paused"
    told("why", work)
    assert "jaxtrain jobs resume" in capsys.readouterr().out
    told("resume", work)
    assert cluster.asked() == ['patch jobset work-1 --namespace=team --type=merge --patch {"spec": {"suspend": false}}']
    told("resume", work, "--nodes=1")
    assert cluster.asked() == ["delete jobset work-1 --namespace=team --cascade=foreground --ignore-not-found",
                               f"create --filename {work}/jobs/1/jobset.yaml --output=json"]
    assert "completions: 1\n" in (work / "jobs/1/jobset.yaml").read_text()
    told("requeue", work)
    chosen = "--selector=jobset.sigs.k8s.io/jobset-name=work-1 --namespace=team"
    assert cluster.asked() == [f"delete pods {chosen} --wait=false"]
    told("cancel", work, "--now")
    assert cluster.asked() == ["delete jobset work-1 --namespace=team --cascade=foreground --wait=false",
                               f"delete pods {chosen} --grace-period=1 --wait=false"]
    (cluster.folder / "get-jobset").unlink()
    assert status(work).state == "cancelled"
    told("logs", work, "--follow")
    assert cluster.asked() == [f"logs {chosen} --prefix --tail=-1 --max-log-requests=2 --follow"]


def test_a_submission_that_was_cut_off_is_found_by_its_folder(cluster, work, capsys):
    assert submit(work) == 0
    jobs.record(job := replace(jobs.newest(work), id=""))
    cluster.jobset(metadata={"name": "work-1", "namespace": "team", "annotations": {jobset.FOLDER: "/other/jobs/1"}})
    assert launch.recovered(work) is None
    cluster.jobset(metadata={"name": "work-1", "namespace": "team", "annotations": {jobset.FOLDER: f"{job.folder}"}})
    assert submit(work) == 2 and "has a job that is waiting (team/work-1" in capsys.readouterr().err


def test_a_cluster_that_answers_is_shown_the_job(cluster, work, capsys):
    assert submit(work, "--dry_run") == 0
    assert cluster.asked() == ["create --dry-run=server --validate=strict --filename=-"]
    assert capsys.readouterr().err == "the cluster would take it\n"
    cluster.fail("create", 'Error from server (BadRequest): unknown field "spec.network.enableDNS"')
    assert submit(work, "--dry_run") == 2
    assert capsys.readouterr().err.startswith('kubectl: Error from server (BadRequest): unknown field')
    cluster.fail("create", "The connection to the server localhost:8080 was refused - did you specify the right host?")
    assert submit(work, "--dry_run") == 0
    assert capsys.readouterr().err.startswith("not shown to a cluster: The connection to the server")
    assert not work.exists()


def test_pods_that_answer_prometheus_have_the_label_that_its_service_selects():
    (pod,) = (one["template"]["spec"]["template"] for one in
              jobset.jobset(golden.job("kubernetes", "gpus"))["spec"]["replicatedJobs"])
    service, monitor = yaml.safe_load_all((ROOT / "deploy" / "prometheus" / "service-monitor.yaml").read_text())
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (port,), (opened,) = service["spec"]["ports"], pod["spec"]["containers"][0]["ports"]
    assert port["targetPort"] == opened["name"] and opened["containerPort"] == 9400
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [one["port"] for one in monitor["spec"]["endpoints"]] == [port["name"]]


def test_kueue_is_told_by_its_workload(cluster, work, capsys):
    assert submit(work, more='queue = "research"') == 0
    cluster.asked()
    cluster.jobset(**QUEUED)
    assert status(work) == jobs.Status("waiting", "suspended")
    told("why", work)
    guide = (ROOT / "docs" / "launch-teams.md").read_text()
    said = capsys.readouterr().out.strip()
    assert said == "Kueue has not taken it: is there a local queue 'research' in team?" and f"| {said} |" in guide
    assert jobs_command.main(["pause", f"{work}"]) == 2 and not (work / "jobs/1/stop").exists()
    cluster.answer("get", "workloads.kueue.x-k8s.io", WORKLOAD)
    told("why", work)
    said = capsys.readouterr().out
    quota, preempted = said.split("; ")
    assert f"| {quota} |" in guide and "(Preempted)" in preempted
    told("pause", work)
    told("resume", work)
    patch = "patch workloads.kueue.x-k8s.io jobset-work-1-abcde --namespace=team --type=merge --patch "
    assert cluster.asked() == [f'{patch}{{"spec": {{"active": {active}}}}}' for active in ("false", "true")]


@pytest.mark.parametrize("pod, said", [
    ({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                      "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}]},
     "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. (Unschedulable)"),
    ({"containerStatuses": [{"state": {"waiting": {"reason": "CreateContainerConfigError",
                                                   "message": 'secret "hub" not found'}}}]},
     'secret "hub" not found (CreateContainerConfigError)'),
    ({}, "not all of its pods run")])
def test_why_says_what_a_pod_waits_for(cluster, work, capsys, pod, said):
    submit(work)
    cluster.jobset()
    cluster.answer("get", "pods", {"items": [{"spec": {}, "status": pod}]})
    told("why", work)
    assert said in capsys.readouterr().out


def test_how_a_job_ended(cluster, work):
    submit(work)
    for kind, state in (("Completed", "done"), ("Failed", "failed")):
        cluster.jobset(status={"conditions": [{"type": "Failed", "status": "False"},
                                              {"type": kind, "status": "True", "message": "said"}]})
        assert status(work) == jobs.Status(state, "said")
    (cluster.folder / "get-jobset").unlink()
    assert status(work).state == "unknown"


@pytest.mark.parametrize("said, fix", [
    ('Error from server (AlreadyExists): jobsets.jobset.x-k8s.io "work-1" already exists', "set another name"),
    ('error: resource mapping not found: no matches for kind "JobSet"', "install JobSet"),
    ("The connection to the server was refused", "the whole command was: kubectl create")])
def test_what_kubectl_refuses_is_told_in_a_line_and_leaves_nothing(cluster, work, capsys, said, fix):
    cluster.fail("create", said)
    assert submit(work) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert fix in line and list((work / "jobs").iterdir()) == []


def test_without_kubectl_it_says_so(work, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert submit(work) == 2
    assert "there is no kubectl here" in capsys.readouterr().err


def test_no_secret_stands_in_a_file(cluster, work, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    (work.parent / "token").write_text("hf_of_the_file")
    secrets = '[secrets]\nHF_TOKEN = "{}"'
    assert submit(work, more=secrets.format("secret:hub/token")) == 0
    spec = work.parent / "file.toml"
    spec.write_text(secrets.format(f"file:{work.parent}/token"))
    assert launch_command.main(["--on=slurm", f"--workdir={work}", f"--job={spec}", "--dry_run", "--", "true"]) == 0
    spec.write_text(f'image = "i"\n{secrets.format("file:token")}\n[mounts]\n"{work.parent}" = "runs"')
    assert launch_command.main(["--on=dstack", f"--workdir={work}", f"--job={spec}", "--dry_run", "--", "true"]) == 0
    said = capsys.readouterr()
    written = "".join(path.read_text() for path in work.rglob("*") if path.is_file()) + said.out + said.err
    assert "HF_TOKEN" in written and "hf_of" not in written


def test_skypilot_and_dstack_are_submitted_by_hand(work, capsys):
    spec = work.parent / "job.toml"
    for engine, what, command in (("skypilot", "gs://runs", "sky jobs launch"), ("dstack", "runs", "dstack apply -f")):
        spec.write_text(f'image = "jaxtrain:1"\n[mounts]\n"{work.parent}" = "{what}"\n')
        assert launch_command.main([f"--on={engine}", f"--workdir={work}", f"--job={spec}", "--", "true"]) == 2
        assert command in capsys.readouterr().err
    assert not work.exists()


def test_crashes_count_and_what_was_saved_does_not():
    """Every exit status of a run has one rule, or counts as a crash."""
    spec = jobset.jobset(golden.job("kubernetes", "gpus"))["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    codes = {code: rule["action"] for rule in job["podFailurePolicy"]["rules"]
             for code in rule.get("onExitCodes", {}).get("values", [])}
    assert codes == {2: "FailJob", 77: "FailJob", 130: "FailJob", 75: "Ignore", 76: "Ignore"}
    assert job["backoffLimit"] == 0 and spec["failurePolicy"]["maxRestarts"] == 3
    assert [rule["action"] for rule in spec["failurePolicy"]["rules"]] == [
        "FailJobSet", "RestartJobSetAndIgnoreMaxRestarts"]


def ended_pod(process: int, when: int, status: int) -> dict:
    return {"metadata": {"annotations": {"batch.kubernetes.io/job-completion-index": f"{process}"}}, "spec": {},
            "status": {"containerStatuses": [{"state": {"terminated": {
                "exitCode": status, "finishedAt": f"2026-01-01T00:00:{when:02}Z"}}}]}}


@pytest.mark.parametrize("pods, restarts, said", [
    ([(0, 3, 76), (1, 2, 139)], 1, "1; the last one because process 1 was killed by SIGSEGV"),
    ([(1, 2, 2)], 0, "failure    process 1 ended with a user error (exit status 2)"), ([], 0, ""),
    ([(0, 1, 76), (1, 2, 76), (1, 4, 76)], 0, "2; the last one because process 0 gave up"),
    ([(1, 1, 1), (0, 5, 75)], 2, "2; the last one because process 1 crashed (exit status 1)")])
def test_the_first_pod_that_failed_tells_why_others_were_made_anew(cluster, work, capsys, pods, restarts, said):
    """Also where pods of its peers were seen to fail before it."""
    submit(work, "--nodes=2")
    cluster.jobset(status={"restarts": restarts, "conditions": [{"type": "Failed", "status": "True"}]})
    cluster.answer("get", "pods", {"items": [ended_pod(*pod) for pod in pods]})
    capsys.readouterr()
    told("show", work)
    shown = capsys.readouterr().out
    assert said in shown and ("because" in shown) == ("because" in said)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None, reason="pip install kubernetes-validate")
@pytest.mark.parametrize("name", golden.SPECS)
def test_kubernetes_knows_every_field(name):
    import kubernetes_validate

    job = jobset.jobset(golden.job("kubernetes", name))["spec"]["replicatedJobs"][0]["template"]
    kubernetes_validate.validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}} | job, "1.33",
                                 strict=True)
    job["spec"]["template"]["spec"]["containers"][0]["imagee"] = "i"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}} | job, "1.33",
                                     strict=True)
