"""The cost of a job so far: by the engine's accounts, or by the run's ledger."""

import json
from pathlib import Path

from jaxtrain.commands import launch as launch_command
from jaxtrain.launch import cost, job_record, jobs
from jaxtrain.launch.job_record import Job
from jaxtrain.launch.job_spec import JobSpec
from tests.launch.slurm_commands import stand_in

GPUS = JobSpec(nodes=2, accelerators_per_node=8, accelerator="NVIDIA-H100")  # $48 an hour


def recorded(workdir: Path, number: int, spec: JobSpec) -> Job:
    job = Job(workdir / "jobs" / f"{number}", "slurm", "name", ["true"], "/", spec, id=f"{number}")
    job.folder.mkdir(parents=True)
    job_record.record(job)
    return job


def ledger(workdir: Path, *ends: str) -> None:
    (workdir / "ledger").mkdir()
    for number, ended in enumerate(ends, start=1):
        seconds = {"init": 600, "step": 3000}
        (workdir / "ledger" / f"{number:04}.json").write_text(json.dumps({
            "began": number * 3600, "seconds": seconds, "ended": ended, "resumed": 100 * (number - 1),
            "reached": [100 * number, 3000], "last_step": 1000}))


def test_the_accounts_of_all_jobs_of_a_workdir_are_added_up(tmp_path, monkeypatch):
    for number in (1, 2):
        job = recorded(tmp_path, number, GPUS)
    ledger(tmp_path, "stopped")
    slurm = tmp_path / "slurm"
    stand_in(slurm, monkeypatch, sacct='for word; do case "$word" in --jobs=*) cat "${word#--jobs=}" ;; esac; done')
    for number, said in (("1", "5400|2"), ("2", "1800|2\n1800|1\n")):  # seconds and nodes of each start
        (slurm / number).write_text(said)
    assert cost.so_far(job) == "$108.00 for 4.50 hours of a node, by slurm's accounts"
    recorded(tmp_path, 3, JobSpec(accelerators_per_node=1, accelerator="a100"))
    (slurm / "3").write_text("36000|1")
    assert cost.so_far(job) == "$128.00 for 14.50 hours of a node, by slurm's accounts", "each at its own price"
    (slurm / "1").unlink()  # not known: the ledger says it for all
    assert cost.so_far(job) == "$48.00 for 1.00 h at $48.00 an hour"


def test_what_is_to_go_is_shown(tmp_path, monkeypatch, capsys):
    job = recorded(tmp_path, 1, GPUS)
    assert cost.to_go(GPUS, tmp_path) == cost.to_go(JobSpec(), tmp_path) == ""
    ledger(tmp_path, "stopped", "stopped", "")
    assert cost.to_go(GPUS, tmp_path) == ""  # a command of one's own
    (tmp_path / "config.json").write_text('{"checkpoint": {"every": 10, "mtbf_hours": 0.0}}')
    stand_in(tmp_path / "slurm", monkeypatch, sacct="", squeue="echo RUNNING\\|None\\|n1")
    (line,) = (line for line in jobs.shown(job).splitlines() if line.startswith("to go"))
    # 7 x 3,000 s of work; a stop every hour and a half costs a start of 600 s each time
    assert "5:50:00 h of training, will cost about $280.25 on demand; $126.11 on spot" in line
    assert line in (Path(__file__).parents[2] / "docs" / "launch.md").read_text()
    stand_in(tmp_path / "slurm", monkeypatch, squeue="echo COMPLETED\\|None\\|n1",
             sbatch="echo sbatch: error: Unable to contact slurm controller >&2; exit 1")
    assert launch_command.main(["--on=slurm", f"--workdir={tmp_path}", "--nodes=2", "--accelerators_per_node=8",
                        "--accelerator=h100", "--dry_run", "--", "true"]) == 0
    assert capsys.readouterr().err == (f"not shown to Slurm: Unable to contact slurm controller\n"
                                       f"{line.split(None, 2)[2]}\n")
