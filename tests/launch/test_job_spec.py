"""The refusals of a job: each mistake is reported in one line, and the workdir stays as it was."""

from pathlib import Path

import pytest

from jaxtrain.commands import launch
from jaxtrain.errors import UserError
from jaxtrain.launch.job_record import Job, read, record
from jaxtrain.launch.job_spec import JobSpec, read_spec, spec_of

ROOT = Path(__file__).parents[2]

PODS = 'image = "i"\nmounts = {{"{workdir}" = "pvc:runs"}}\n'  # {workdir} is the run's
TPU = 'accelerator = "tpu-v5p-slice"\naccelerators_per_node = 4\n'
WRONG = [  # the engine, the spec, how its line begins, and a part of the rest
    ("local", "nodez = 2", "nodez", "did you mean 'nodes'"),
    ("local", "nodes = 0", "nodes", "give 1 or more"),
    ("local", "grace_s = 0", "grace_s", "give 1 or more"),
    ("local", "retries = -1", "retries", "give 0 or more"),
    ("local", "memory_gb = nan", "memory_gb", "give 0 or more"),
    ("local", 'nodes = "2"', "nodes", "is not a whole number"),
    ("local", "nodes = true", "nodes", "is not a whole number"),
    ("local", "memory_gb = '8'", "memory_gb", "is not a number"),
    ("local", "name = 1", "name", "is not a text"),
    ("local", "preemptible = 1", "preemptible", "is not true or false"),
    ("local", 'setup = "ls"', "setup", "is not a list of texts"),
    ("local", "env = {A = 1}", "env", "is not a table of texts"),
    ("local", "nodes = 2\nmin_nodes = 3", "min_nodes", "more than nodes=2"),
    ("local", 'name = "Big Run"', "name", "lower-case letters"),
    ("local", 'accelerator = "h100"', "accelerator", "set accelerators_per_node"),
    ("local", "accelerators_per_node = 8\nprocesses_per_node = 3", "processes_per_node", "that divides them"),
    ("local", 'time = "24h"', "time", "write H:MM:SS"),
    ("local", 'time = "0:01:00"', "time", "leaves less than grace_s=120"),
    ("local", 'mounts = {"/a" = "/b"}', "mounts", "there is no image"),
    ("local", 'env = {"A-B" = "1"}', "env", "not the name of a variable"),
    ("local", 'env = {JAX_PROCESS_ID = "1"}', "env", "is set for each process"),
    ("local", 'env = {A = "1"}\nsecrets = {A = "file:a"}', "env", "under secrets too"),
    ("local", 'env = {HF_TOKEN = "hf_1"}', "env.HF_TOKEN", 'secrets.HF_TOKEN = "file:PATH"'),
    ("local", 'env = {HTTPS_PROXY = "http://me:word@proxy:80"}', "env.HTTPS_PROXY", "secrets.HTTPS_PROXY ="),
    ("local", 'env = {OTLP_HEADERS = "authorization=Bearer x"}', "env.OTLP_HEADERS", "secrets.OTLP_HEADERS ="),
    ("local", 'setup = ["pip install --index-url=https://me:word@host/simple mine"]', "setup", "under secrets"),
    ("local", 'setup = ["curl -O https://host/data?token=word"]', "setup", "under secrets"),
    ("local", 'setup = ["git clone https://me:${TOKEN:-word}@host/mine"]', "setup", "under secrets"),
    ("local", 'secrets = {HF_TOKEN = "hf_1"}', "secrets.HF_TOKEN", "the place of the secret"),
    ("local", 'secrets = {HF_TOKEN = "secret:hub"}', "secrets.HF_TOKEN", "the place of the secret"),
    ("local", 'queue = "a b"', "queue", "has spaces"),
    ("local", 'extra = ["a\\nb"]', "extra", "line breaks"),
    ("local", 'topology = "4by4"', "topology", "write it like 4x4"),
    ("local", f'{TPU}topology = "4x4"\nnodes = 2', "topology", "has 16 chips, and 2 x 4 are requested"),
    ("local", "nodes = 2", "nodes", "set nodes=1"),
    ("local", 'image = "i"', "image", "does not read it"),
    ("local", 'secrets = {A = "secret:hub/token"}', "secrets.A", "Kubernetes"),
    ("slurm", 'secrets = {A = "secret:hub/token"}', "secrets.A", "Slurm keeps no secrets"),
    ("slurm", 'image = "a"\nmounts = {"/b:c" = "/d"}', "mounts./b:c", "is not a folder that nodes have"),
    ("slurm", 'image = "a.sqsh"\nmounts = {"/b" = "/c,d"}', "mounts./b", "is not a folder that nodes have"),
    ("slurm", PODS, "mounts.{workdir}", "is not a folder that nodes have"),
    ("slurm", 'extra = ["--constraint=[a*2&b*2]"]', "extra", "machines of several kinds"),
    ("nomad", "", "--on", "is not a known engine"),
    ("kubernetes", "", "image", "there is none"),
    ("kubernetes", 'image = "i"', "--workdir", "is not on a mount"),
    ("kubernetes", 'image = "i"\nmounts = {"/mnt" = "pvc:runs"}', "--workdir", "is not on a mount"),
    ("kubernetes", 'image = "i"\nmounts = {mnt = "pvc:runs"}', "mounts", "begin it with /"),
    ("kubernetes", 'image = "i"\nmounts = {"/mnt" = "nfs:runs"}', "mounts./mnt", "give pvc:NAME or /PATH"),
    ("kubernetes", f'{PODS}account = "A"', "account", "is not the name of a service account"),
    ("kubernetes", f'{PODS}priority = "high"', "priority", "kubernetes does not read it"),
    ("kubernetes", f"{PODS}nodes = 4\nmin_nodes = 2", "min_nodes", "all its pods or none"),
    ("kubernetes", f'{PODS}name = "2nd"', "name", "does not begin with a letter"),
    ("kubernetes", f'{PODS}name = "{"a" * 48}"', "name", "is 1 letters too long"),
    ("kubernetes", f'{PODS}secrets = {{A = "file:a"}}', "secrets.A", "kubectl create secret"),
    ("kubernetes", f'{PODS}secrets = {{A = "secret:Hub/token"}}', "secrets.A", "give secret:NAME/KEY"),
    ("kubernetes", f'{PODS}extra = ["--exclusive"]', "extra", "LABEL=VALUE"),
    ("kubernetes", PODS + TPU, "topology", "set it, such as 2x2x4"),
    ("kubernetes", f'{PODS}{TPU}topology = "2x2"\nprocesses_per_node = 4', "processes_per_node", "leave it out"),
    ("skypilot", PODS, "mounts.{workdir}", "is not a bucket"),
    ("skypilot", PODS.replace("pvc:", "gs://") + "accelerators_per_node = 8", "accelerator", "such as H100"),
    ("skypilot", PODS.replace("pvc:", "gs://") + 'queue = "q"', "queue", "skypilot does not read it"),
    ("dstack", PODS, "mounts.{workdir}", "neither a volume"),
    ("dstack", PODS.replace("pvc:", "") + "processes_per_node = 2", "processes_per_node", "leave it out"),
]


@pytest.mark.parametrize("engine, text, key, part", WRONG, ids=[f"{case[0]}-{case[2]}-{case[3]}" for case in WRONG])
@pytest.mark.parametrize("dry", [(), ("--dry_run",)], ids=["", "dry"])
def test_a_wrong_job_is_refused_in_a_line(tmp_path, capsys, engine, text, key, part, dry):
    workdir, spec = tmp_path / "work", tmp_path / "job.toml"
    workdir.mkdir()
    text, key = (each.replace("{workdir}", f"{workdir}") for each in (text.replace("{{", "{").replace("}}", "}"), key))
    spec.write_text(text)
    assert launch.main([f"--on={engine}", f"--workdir={workdir}", f"--job={spec}", *dry, "--", "true"]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith(f"{key}: ") and part in line and said.out == ""
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize(("words", "workdir"), [
    (["configs/gpt.py:tiny"], "runs/gpt-tiny"), (["--", "true"], "runs/job"),
    (["configs/gpt.py", "--array=3-4"], "runs/gpt-{task}")])
def test_a_workdir_is_needed_to_submit_a_job_and_not_to_see_it(tmp_path, capsys, monkeypatch, words, workdir):
    words = [f"{ROOT}/{words[0]}" if words[0] != "--" else "--", *words[1:]]
    monkeypatch.chdir(tmp_path)
    assert launch.main(["--on=slurm", *words]) == 2
    assert capsys.readouterr().err == (f"--workdir: it is missing; give a folder on a file system that all machines "
                                       f"share, such as --workdir={workdir}\n")
    assert launch.main(["--on=slurm", "--dry_run", *words]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"shown with --workdir={workdir}, since none is given\n")
    assert f"{tmp_path}/{workdir.replace('{task}', '3')}" in said.out and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags, key", [
    (["--nodes=two"], "nodes"), (["--memory_gb=inf"], "memory_gb"), (["--preemptible=maybe"], "preemptible"),
    (["--setup=ls"], "command line"), (["--job=/nowhere.toml"], "--job"), (["configs/gpt.py"], "command line"),
    (["--config=configs/gpt.py"], "command line"),
    (["--", "curl", "s3://user:pass@host/x"], "s3://")])
def test_wrong_flags_are_refused_in_a_line(tmp_path, capsys, flags, key):
    words = flags if "--" in flags else [*flags, "--", "true"]
    assert launch.main(["--on=local", f"--workdir={tmp_path}", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(key) and "pass@" not in line and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", [
    "git clone https://$TOKEN@host/mine", "git clone https://me:${TOKEN}@host/mine", "curl -O 'https://host/a?key=$KEY'",
    "pip install 'mine @ git+https://host/mine.git@v1#egg=mine&subdirectory=python'",
    "pip install https://host/mine.whl#sha256=0123", "pip install git+ssh://git@host/mine"])
def test_setup_may_name_variables_in_urls_and_parts_of_packages(line):
    assert spec_of({"setup": [line]}).setup == (line,)


def test_a_job_of_before_is_read_whatever_is_refused_today(tmp_path):
    """It may run still, and has to be shown and cancelled."""
    spec = JobSpec(env={"HF_TOKEN": "hf_1"}, setup=("curl https://host/?token=word",))
    job = Job(tmp_path, "local", "mine", ["true"], f"{tmp_path}", spec, {}, "1", 1.0)
    record(job)
    assert read(tmp_path).spec == spec


def test_flags_win_over_the_file_and_a_spec_survives_its_record(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('nodes = 4\nmemory_gb = 8\nsetup = ["a", "b"]\nenv = {A = "1"}\n')
    spec = read_spec(path, {"nodes": "2", "preemptible": "false", "time": "1-00:00:00"})
    assert (spec.nodes, spec.memory_gb, spec.seconds, spec.preemptible) == (2, 8.0, 86400, False)
    assert spec.as_dict() == {"nodes": 2, "memory_gb": 8.0, "time": "1-00:00:00", "preemptible": False,
                              "setup": ["a", "b"], "env": {"A": "1"}}
    with pytest.raises(UserError, match="processes"):
        JobSpec(accelerators_per_node=4, processes_per_node=8)


def test_help_explains_every_flag():
    shown = {name for name in JobSpec.__dataclass_fields__
             if isinstance(getattr(JobSpec(), name), str | int | float)}  # lists and tables are in a file only
    told = {name: spec.metadata["help"] for name, spec in JobSpec.__dataclass_fields__.items() if spec.metadata}
    assert told.keys() == shown and all(told.values())
