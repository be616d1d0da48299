"""Five jobs as each engine writes them, or refuses them: the files in golden/.

    python -m tests.launch.test_golden_jobs

writes them anew; read what changed before it is committed.
"""

import sys
from pathlib import Path

import pytest

from jaxtrain.errors import UserError
from jaxtrain.launch.job_engines import engine_of
from jaxtrain.launch.job_record import Job
from jaxtrain.launch.job_spec import ENGINES, JobSpec

GOLDEN = Path(__file__).parent / "golden"
TRAIN = ["python", "-m", "jaxtrain.main", "--config=configs/gpt.py", "--workdir=/mnt/runs/big"]
CONTAINER = {"image": "registry.example/jaxtrain:1", "mounts": {"/mnt/runs": "pvc:runs"}}
SPECS = {
    "cpu": {"cpus_per_process": 4, "memory_gb": 16},
    "gpus": {"nodes": 4, "accelerators_per_node": 8, "accelerator": "h100", "cpus_per_process": 96, "memory_gb": 1500,
             "time": "24:00:00", "grace_s": 300, "queue": "research", "priority": "high"},
    "tpu": {"nodes": 4, "accelerators_per_node": 4, "accelerator": "tpu-v5p-slice", "topology": "2x2x4",
            "extra": ("cloud.google.com/gke-spot=true",), "preemptible": False},
    "secrets": {"nodes": 2, "retries": 10, "env": {"XLA_FLAGS": "--xla_dump_to=/mnt/runs/$(dump)"},
                "setup": ("source .venv/bin/activate", "export THREADS=$(nproc)"),
                "secrets": {"HF_TOKEN": "secret:hub/token"}},
    "own": {"nodes": 2, "accelerators_per_node": 2, "processes_per_node": 2, "extra": ("--exclusive",)},
}
OTHERWISE = {  # what each engine calls otherwise
    "local": {"secrets": {"secrets": {"HF_TOKEN": "file:~/.hf-token"}, "nodes": 1}},
    "slurm": {"secrets": {"secrets": {"HF_TOKEN": "file:~/.hf-token"}},
              "gpus": CONTAINER | {"mounts": {"/mnt/runs": "/lustre/runs"}},
              "own": {"image": "/images/jaxtrain.sqsh", "mounts": {"/data": "/lustre/data"}}},
    "kubernetes": {name: CONTAINER for name in SPECS} | {
        "own": CONTAINER | {"extra": ("pool=own",)},
        "gpus": CONTAINER | {"accelerator": "NVIDIA-H100-80GB-HBM3", "account": "trainer"}},
    "ray": {"gpus": {"time": "", "queue": "", "priority": ""}, "own": {"extra": ()},
            "tpu": {"topology": "", "extra": (), "preemptible": True},
            "secrets": {"secrets": {"HF_TOKEN": "file:~/.hf-token"}}},
    "skypilot": {name: CONTAINER | {"mounts": {"/mnt/runs": "gs://runs"}} for name in SPECS},
    "dstack": {name: CONTAINER | {"mounts": {"/mnt/runs": "runs"}} for name in SPECS},
}
for kind in ("skypilot", "dstack"):
    OTHERWISE[kind] = OTHERWISE[kind] | {
        "gpus": OTHERWISE[kind]["gpus"] | {"queue": "", "priority": "", "accelerator": "H100"},
        "own": OTHERWISE[kind]["own"] | {"extra": (), "processes_per_node": 1, "accelerator": "A100"}}
OTHERWISE["skypilot"]["gpus"] |= {"time": ""}
OTHERWISE["dstack"]["secrets"] |= {"retries": 3}
CASES = [(engine, name) for engine in ENGINES if engine in OTHERWISE for name in SPECS]


def job(engine: str, name: str) -> Job:
    spec = JobSpec(**SPECS[name] | OTHERWISE[engine].get(name, {}))
    command = ["python", "train.py", "--prompt=it's $HOME"] if name == "own" else TRAIN
    about = {"metrics_port": 9400} if name == "gpus" else {}
    return Job(Path("/mnt/runs/big/jobs/1"), engine, "big", command, "/mnt/runs/code", spec, about)


def rendered(engine: str, name: str) -> str:
    try:
        engine_of(engine).check(job(engine, name))
    except UserError as error:
        return f"{error}\n"
    files = engine_of(engine).render(job(engine, name))
    text = "".join(f"# {name}\n" * (len(files) > 1) + content for name, content in files.items())
    return text.replace(sys.executable, "PYTHON")


@pytest.mark.parametrize("engine, name", CASES)
def test_a_job_is_written_as_before(engine, name):
    assert rendered(engine, name) == (GOLDEN / f"{engine}-{name}.txt").read_text()


def test_no_file_is_left_of_what_is_not_written():
    assert {path.stem for path in GOLDEN.iterdir()} == {f"{engine}-{name}" for engine, name in CASES}


if __name__ == "__main__":
    for each in CASES:
        (GOLDEN / f"{'-'.join(each)}.txt").write_text(rendered(*each))
