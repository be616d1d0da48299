"""The example of two teams, and a job of one of them."""

import re
import shlex
from pathlib import Path

import yaml

from jaxtrain.commands import launch
from jaxtrain.launch.job_record import Job
from jaxtrain.launch.job_spec import read_spec
from jaxtrain.launch.kubernetes.kubernetes_engine import KubernetesEngine

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "launch"


def made(kind: str) -> dict[str, dict]:
    found = yaml.safe_load_all((EXAMPLES / "teams.yaml").read_text())
    return {f"{one['metadata'].get('namespace', '')}/{one['metadata']['name']}": one.get("spec", {})
            for one in found if one["kind"] == kind}


def test_the_queues_of_the_teams_name_what_there_is():
    queues = made("ClusterQueue")
    assert {f"/{queue['cohortName']}" for queue in queues.values()} == made("Cohort").keys()
    for name, queue in made("LocalQueue").items():
        chosen = queues[f"/{queue['clusterQueue']}"]["namespaceSelector"]["matchLabels"]
        assert chosen == {"kubernetes.io/metadata.name": name.split("/")[0]}
    for queue in queues.values():
        assert queue["preemption"].keys() == {"reclaimWithinCohort", "withinClusterQueue"}
        (group,) = queue["resourceGroups"]
        (flavor,) = group["flavors"]
        assert f"/{flavor['name']}" in made("ResourceFlavor")
        assert [one["name"] for one in flavor["resources"]] == group["coveredResources"]


def test_the_job_fits_a_team():
    spec = read_spec(EXAMPLES / "kubernetes.toml", {})
    job = Job(Path("/mnt/runs/big/jobs/1"), "kubernetes", "big", ["true"], "/jaxtrain", spec)
    KubernetesEngine().check(job)
    manifest = yaml.safe_load(KubernetesEngine().render(job)["jobset.yaml"])
    assert f"research/{spec.queue}" in made("LocalQueue") and f"/{spec.priority}" in made("WorkloadPriorityClass")
    (run,) = manifest["spec"]["replicatedJobs"]
    asked = run["template"]["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
    pods = run["template"]["spec"]["parallelism"]
    (flavor,) = made("ClusterQueue")["/research"]["resourceGroups"][0]["flavors"]
    quota = {one["name"]: one["nominalQuota"] for one in flavor["resources"]}
    assert asked.keys() == quota.keys()  # Kueue admits nothing that asks for what a queue does not cover
    assert pods * int(asked["nvidia.com/gpu"]) <= quota["nvidia.com/gpu"] and pods * int(asked["cpu"]) <= quota["cpu"]
    assert pods * int(asked["memory"].removesuffix("M")) <= int(quota["memory"].removesuffix("G")) * 1000


def test_the_command_of_the_guide_writes_what_it_says(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    guide = (ROOT / "docs" / "launch-kubernetes.md").read_text()
    (command,) = re.findall(r"^jaxtrain launch (.* --dry_run)$", guide, re.M)
    assert launch.main(shlex.split(command)) == 0
    (run,) = yaml.safe_load(capsys.readouterr().out)["spec"]["replicatedJobs"]  # the file's name is a comment
    container = run["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == [
        "python", "-m", "jaxtrain.main", "--config=configs/gpt.py", "--config.data.global_batch_size=32",
        "--workdir=/mnt/runs/big"]
    assert "workingDir" not in container  # the image has one
