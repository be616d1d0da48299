"""The batch script at the end of a run, with commands that stand in for Slurm's."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.distributed import exit_codes
from jaxtrain.errors import UserError
from jaxtrain.launch import slurm_engine
from jaxtrain.launch.job_record import Job, Status
from jaxtrain.launch.job_spec import JobSpec
from jaxtrain.launch.restarts import first_failure, idle_starts, restart_history
from jaxtrain.launch.slurm_script import script
from tests.launch.slurm_commands import stand_in
from tests.launch.waiting import LIMIT

STAND_INS = {
    "srun": 'if [ "$RUN" ]; then while [ "$1" != bash ]; do shift; done; exec "$@" > "$ASKED"; fi; '
            'echo "$*" > "$ASKED"; exit "$STATUS"',
    "scontrol": 'echo "$*" >> "$SAID"; echo "   JobState=$STATE Reason=None"; case $1 in requeue*) kill $PPID ;; esac'}


# It takes the options that the script gives, as the manual of Apptainer 1.3 has them, and runs the command itself.
APPTAINER = """
import argparse, os, sys
parser = argparse.ArgumentParser(prog="apptainer", allow_abbrev=False)
parser.add_argument("what", choices=["exec"])
parser.add_argument("--nv", action="store_true")
parser.add_argument("--bind", action="append", default=[])
parser.add_argument("image")
parser.add_argument("command", nargs=argparse.REMAINDER)
flags = parser.parse_args()
binds = [bind.split(":") for bind in flags.bind]
assert all(len(bind) <= 2 and os.path.isdir(bind[0]) for bind in binds), binds
assert any(os.getcwd().startswith(bind[-1]) for bind in binds), "the folder is not in the container"
assert flags.image.startswith("docker://") or os.path.isfile(flags.image), flags.image
print(flags.nv, flags.image, *[":".join(bind) for bind in binds], flush=True)
os.execvp(flags.command[0], flags.command)
"""


def ended(job: Job, status: int, state: str, nodes: int = 1, run: bool = False) -> tuple[int, list[str], str]:
    """The script's status, what it has told Slurm to do, and what it started; with `run` what that printed."""
    place = Path(job.directory)
    job.folder.mkdir(parents=True, exist_ok=True)
    for name, text in STAND_INS.items():
        (place / name).write_text(f"#!/bin/bash\n{text}\n")
        (place / name).chmod(0o755)
    (job.folder / "job.sh").write_text(script(job))
    environment = os.environ | {"PATH": f"{place}:{os.environ['PATH']}", "STATUS": f"{status}", "STATE": state,
                                "SAID": f"{place}/said", "ASKED": f"{place}/asked", "SLURM_JOB_ID": "7",
                                "SLURM_JOB_NUM_NODES": f"{nodes}", "SLURM_NTASKS": "1", "SLURM_PROCID": "0",
                                "RUN": "1" * run}
    done = subprocess.run(["bash", f"{job.folder}/job.sh"], env=environment, capture_output=True, timeout=LIMIT)
    assert not done.stderr, done.stderr
    told = [line for line in (place / "said").read_text().splitlines() if line.startswith("requeue")]
    return done.returncode, told, (place / "asked").read_text()


@pytest.mark.parametrize("status, state, stop, said, code", [
    (75, "RUNNING", "", "requeue 7", -15), (76, "RUNNING", "", "requeue 7", -15), (1, "RUNNING", "", "requeue 7", -15),
    (75, "SIGNALING", "", "requeue 7", -15),  # it has saved while Slurm still told its nodes to
    (75, "RUNNING", "pause", "requeuehold 7", -15), (75, "RUNNING", "cancel", "", 0),
    (75, "COMPLETING", "", "", 75), (2, "RUNNING", "", "", 2), (0, "RUNNING", "", "", 0)])
def test_what_the_script_tells_slurm(tmp_path, status, state, stop, said, code):
    job = Job(tmp_path / "jobs" / "1", "slurm", "name", ["true"], f"{tmp_path}", JobSpec())
    job.folder.mkdir(parents=True)
    if stop:
        job.pause_file.write_text(stop)
    assert ended(job, status, state)[:2] == (code, [said] if said else [])


# The real srun too ends with the highest status of its tasks. These end in the order of END, as RANK:STATUS.
SRUN = """
while [ "$1" != bash ]; do shift; done
highest=0
for one in $END; do
  SLURM_PROCID=${one%:*} CODE=${one#*:} "$@"; code=$?
  [ $code -gt $highest ] && highest=$code
done
exit $highest
"""
ENDS = [(["0:0", "1:0"], None), (["1:1", "0:75"], (1, 1)), (["1:1", "0:76"], (1, 1)), (["0:76", "1:1"], (1, 1)),
        (["0:2", "1:76"], (0, 2)), (["1:134", "0:2"], (0, 2)), (["1:139", "0:75"], (1, 139)),
        (["1:137", "0:76"], (1, 137)),
        (["0:76", "1:134"], (0, 76)), (["1:134", "0:76"], (1, 134)), (["0:75", "1:76"], (1, 76)),
        (["1:75", "0:75"], (1, 75)), (["0:1", "1:77"], (1, 77))]


def of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: list[str], job: Job,
           start: int = 0) -> tuple[int, list[str], str]:
    """The script's status, what it has told Slurm to do, and what it printed; `end`: of its processes, in order."""
    stand_in(slurm := tmp_path / "slurm", monkeypatch, srun=SRUN,
             scontrol=f'{STAND_INS["scontrol"]}'.replace("$SAID", f"{tmp_path}/said").replace("$STATE", "RUNNING"))
    (slurm / "srun").write_text(f"#!/bin/bash{SRUN}")
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "job.sh").write_text(script(job))
    (tmp_path / "said").write_text("")
    environment = os.environ | {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": f"{len(end)}", "END": " ".join(end),
                                "SLURM_NTASKS": f"{len(end)}", "SLURM_RESTART_COUNT": f"{start}"}
    done = subprocess.run(["bash", f"{job.folder}/job.sh"], env=environment, capture_output=True, text=True,
                          timeout=LIMIT)
    assert not done.stderr, done.stderr
    told = [line for line in (tmp_path / "said").read_text().splitlines() if line.startswith("requeue")]
    return done.returncode, told, done.stdout


def two(tmp_path: Path, command: str = "exit $CODE", **keys) -> Job:
    return Job(tmp_path / "a b" / "jobs" / "1", "slurm", "name", ["bash", "-c", command], f"{tmp_path}",
               JobSpec(nodes=2, **keys))


@pytest.mark.parametrize("end, first", ENDS)
def test_the_first_failure_of_several_processes_counts(tmp_path, monkeypatch, end, first):
    """The script, which is bash, and the other engines have one rule."""
    job = two(tmp_path, retries=0)
    assert first_failure.of_job([tuple(map(int, one.split(":"))) for one in end]) == first
    code, told, printed = of_all(tmp_path, monkeypatch, end, job)
    if first is None:
        assert (code, told) == (0, [])
        return
    process, status = first
    assert f"process {process} of 2 was the first to end early, with status {status}\n" in printed
    again = status in (75, 76)  # as no crash, of which there may be none
    assert (code, told) == ((-15, ["requeue 7"]) if again else (status, []))
    assert (job.folder / "crashes").exists() == (not again and status not in (2, 77))
    if again:
        assert [(line["status"], line["process"]) for line in map(
            json.loads, (job.folder / "restarts.jsonl").read_text().splitlines())] == [(status, process)]


@pytest.mark.parametrize("number, status", [(11, 139), (9, 137), (6, 134)])
def test_a_process_that_is_killed_by_a_signal_has_crashed(tmp_path, monkeypatch, number, status):
    """The message of bash about that goes to the output."""
    job = two(tmp_path, f"ulimit -c 0; [ $CODE = signal ] && kill -{number} $BASHPID; exit $CODE", retries=1)
    ends = ["0:75"]
    monkeypatch.setattr(subprocess, "run", lambda *words, run=subprocess.run, **more: quiet(run(*words, **more)))
    assert of_all(tmp_path, monkeypatch, ["1:signal", *ends], job)[:2] == (-15, ["requeue 7"])
    assert of_all(tmp_path, monkeypatch, ["1:signal", *ends], job, 1)[:2] == (status, [])  # its retry was the last
    found = restart_history.of(job)
    assert found.count == 1 and f"process 1 {exit_codes.words(status)} at " in found.reason


def quiet(done: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """Leave out what bash says of a process that was killed."""
    done.stderr = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("run: line"))
    return done


def test_a_command_that_gives_up_at_once_is_not_started_for_ever(tmp_path, monkeypatch):
    """A run of a config counts its steps instead (test_idle_starts.py)."""
    job = two(tmp_path)
    for start in range(idle_starts.MOST):
        assert of_all(tmp_path, monkeypatch, ["0:76", "1:76"], job, start)[:2] == (-15, ["requeue 7"])
    code, told, printed = of_all(tmp_path, monkeypatch, ["0:76", "1:76"], job, idle_starts.MOST)
    assert (code, told) == (77, []) and "10 restarts in a row of less than 600 seconds each" in printed
    assert len(list(job.folder.glob("ends*"))) == 1  # of the newest start


@pytest.mark.parametrize("given, counts, used", [(4, [2, 4], 4), (3, [2, 4], 2), (2, [2, 4], 2), (3, [], 3)])
def test_a_run_uses_as_many_of_its_nodes_as_its_mesh_can(tmp_path, given, counts, used):
    job = Job(tmp_path / "jobs" / "1", "slurm", "name", ["true"], f"{tmp_path}",
              JobSpec(nodes=4, min_nodes=2, processes_per_node=2), {"node_counts": counts})
    assert f"--nodes={used} --ntasks={2 * used} " in ended(job, 0, "RUNNING", given)[2]
    assert "export JAXTRAIN_FULL_PROCESSES=8\n" in script(job)


def test_sbatch_reads_any_workdir():
    """Slurm 22.05 was seen to read them so; tests/launch/slurm has a job in such a folder."""
    lines = [line for line in script(Job(Path("""/a b/c's "d" #5%j/jobs/1"""), "slurm", "name", ["true"], "/",
                                         JobSpec())).splitlines() if "--output" in line]
    assert lines == ['#SBATCH --output="/a b/c\'s \\"d\\" #5%%j/jobs/1/output.log"']


@pytest.mark.parametrize("said, state, detail, why", [
    ("PREEMPTED|None|", "failed", "PREEMPTED", "it has failed: PREEMPTED"),
    ("PENDING|launch failed requeued held|", "paused", "launch failed requeued held", "a node could not start it"),
    ("PENDING|ReqNodeNotAvail, UnavailableNodes:n1|", "waiting", "ReqNodeNotAvail, UnavailableNodes:n1",
     "nodes that it asks for are down"),
    ("PENDING|Priority|", "waiting", "Priority", "jobs of a higher priority wait too, and come first (Priority)")])
def test_what_squeue_says(tmp_path, monkeypatch, said, state, detail, why):
    """The last one has begun when it is looked for among those who wait."""
    stand_in(tmp_path / "slurm", monkeypatch, squeue=f"""case "$*" in
        *--states=all*) echo {shlex.quote(said)} ;;
        *) echo "5 research research" ;; esac""")
    job = Job(tmp_path / "jobs" / "1", "slurm", "name", ["true"], "/", JobSpec(), id="7")
    engine = slurm_engine.SlurmEngine()
    assert engine.status(job) == Status(state, detail) and engine.why(job).startswith(why)
    assert "before it" not in engine.why(job)


@pytest.mark.parametrize("image, mounted", [("registry.example/jaxtrain:1", "docker://registry.example/jaxtrain:1"),
                                            ("docker://jaxtrain", "docker://jaxtrain"), ("{}/own.sif", "{}/own.sif")])
def test_a_run_in_a_container_has_its_folders_and_variables(tmp_path, image, mounted):
    """A program stands in for apptainer; what it does itself is not tested here."""
    (data := tmp_path / "data").mkdir()
    (tmp_path / "own.sif").touch()
    (tmp_path / "apptainer").write_text(f"#!{sys.executable}{APPTAINER}")
    (tmp_path / "apptainer").chmod(0o755)
    command = ["bash", "-c", 'echo "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES: $TOLD"; pwd']
    spec = JobSpec(image=image.format(tmp_path), mounts={"/data": f"{data}"}, env={"TOLD": "it's"})
    (work := tmp_path / "work").mkdir()
    assert ended(Job(work / "jobs" / "1", "slurm", "name", command, f"{tmp_path}", spec), 0, "RUNNING",
                 run=True)[2].splitlines() == [f"False {mounted.format(tmp_path)} {data}:/data {work} {tmp_path}",
                                               "0 of 1: it's", f"{tmp_path}"]


def test_what_has_ended_is_neither_paused_nor_resumed(tmp_path, monkeypatch):
    job, engine = Job(tmp_path, "slurm", "a", ["true"], "/", JobSpec(), id="7"), slurm_engine.SlurmEngine()
    slurm = tmp_path / "slurm"
    stand_in(slurm, monkeypatch, sacct="", squeue="echo squeue >> said; cat answer",
             scontrol='echo scontrol "$*" >> said')
    (slurm / "answer").write_text("CANCELLED|BeginTime|")
    assert engine.status(job) == Status("cancelled")  # why it had waited counts no more
    (slurm / "answer").write_text("PENDING|None|")
    assert engine.why(job) == "it is waiting, and Slurm does not say yet for what"
    for answer, ask, line in (
            ("CANCELLED|BeginTime|", engine.pause, "its job was cancelled; to resume from its last checkpoint, launch"),
            ("COMPLETED|None|n1", lambda job: engine.resume(job, None), "its job has finished; to resume"),
            ("RUNNING|None|n1", lambda job: engine.resume(job, None), "its job is running, and continues by"),
            ("RUNNING|None|n1", lambda job: engine.resume(job, 2), ".*; for other nodes pause it first")):
        (slurm / "answer").write_text(answer)
        with pytest.raises(UserError, match=f"^WORKDIR: {line}"):
            ask(job)
    assert {*(slurm / "said").read_text().split()} == {"squeue"} and not job.pause_file.exists()
    stand_in(slurm, monkeypatch, squeue="cat answer >&2; exit 1")
    (slurm / "answer").write_text("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(UserError, match="Unable to contact"):  # which says nothing about the job
        engine.status(job)
    (slurm / "answer").write_text("slurm_load_jobs error: Invalid job id specified")
    assert engine.status(job) == Status("unknown", "Slurm does not know it any more")
    stand_in(slurm, monkeypatch, squeue="echo RUNNING\\|None\\|n1")
    job.pause_file.write_text("pause")  # it is told to pause, and still saves
    engine.resume(job, None)
    assert (slurm / "said").read_text().splitlines()[-1] == "scontrol release 7" and not job.pause_file.exists()
