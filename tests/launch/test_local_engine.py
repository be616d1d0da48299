"""Jobs on this machine, with a program that saves when it is told to stop."""

import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from jaxtrain.commands import jobs as jobs_command
from jaxtrain.commands import launch
from jaxtrain.launch import job_record
from jaxtrain.launch.local_engine import LocalEngine
from tests.launch.waiting import status_of, wait_for

PROGRAM = textwrap.dedent("""\
    import os, signal, sys, time
    workdir = sys.argv[1]
    def save(*_):
        open(f"{workdir}/saved", "w")
        sys.exit(75)
    signal.signal(signal.SIGTERM, save)
    print("attempt", os.environ["KIND"], os.environ["KEY"] == "s3cret", flush=True)
    open(f"{workdir}/began", "w")
    end = f"{workdir}/end"
    while not (os.path.exists(end) and open(end).read()):
        time.sleep(0.02)
    sys.exit(int(open(end).read()))
    """)


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """The program, submitted and begun."""
    monkeypatch.chdir(tmp_path)  # which is not a checkout
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "key").write_text("s3cret\n")
    (tmp_path / "job.toml").write_text(f'[env]\nKIND = "a b"\n[secrets]\nKEY = "file:{tmp_path}/key"\n')
    folder = tmp_path / "work"
    assert launch.main(["--on=local", f"--workdir={folder}", f"--job={tmp_path}/job.toml", "--", sys.executable,
                        f"{tmp_path}/program.py", str(folder)]) == 0
    wait_for((folder / "began").exists)
    yield folder
    (folder / "end").write_text("0")
    wait_for(lambda: state(folder) != "running")


def state(workdir: Path) -> str:
    return status_of(workdir).state


def told(what: str, workdir: Path, *flags: str) -> None:
    assert jobs_command.main([what, str(workdir), *flags]) == 0


def test_a_job_pauses_goes_on_and_ends(workdir, capsys):
    told("pause", workdir)
    wait_for(lambda: state(workdir) == "paused")
    assert (workdir / "saved").exists()
    (workdir / "began").unlink()
    told("resume", workdir)
    wait_for((workdir / "began").exists)
    capsys.readouterr()
    told("show", workdir)
    assert "state      running" in capsys.readouterr().out
    (workdir / "end").write_text("0")
    wait_for(lambda: state(workdir) == "done")
    told("logs", workdir)
    assert capsys.readouterr().out == "attempt a b True\n" * 2
    told("list", workdir.parent, "--json")
    listed = json.loads(capsys.readouterr().out)
    assert (listed["workdir"], listed["engine"], listed["state"]) == ("work", "local", "done")
    told("show", workdir, "--json")
    assert json.loads(capsys.readouterr().out)["state"].startswith("done")
    told("list", workdir.parent)
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["work", "local"]
    assert not any("s3cret" in path.read_text() for path in (workdir / "jobs" / "1").iterdir())


@pytest.mark.parametrize(("state", "told"), [
    ("waiting", "it is waiting"), ("running", "it is running"), ("paused", "it is paused"), ("done", "it has finished"),
    ("failed", "it has failed"), ("cancelled", "it was cancelled"), ("stopped", "it was stopped"),
    ("unknown", "it is in an unknown state")])
def test_every_state_has_a_sentence(state, told):
    status = job_record.Status(state, "why")
    assert (status.sentence(), replace(status, detail="").sentence()) == (f"{told}: why", told)


def test_cancelling_saves_first_and_at_once_does_not(workdir):
    told("cancel", workdir)
    wait_for(lambda: state(workdir) == "cancelled")
    assert (workdir / "saved").exists()


def test_a_second_job_is_refused_and_one_that_was_killed_is_told(workdir, capsys):
    assert jobs_command.main(["resume", f"{workdir}"]) == 2
    assert "its job is running, and continues by itself; leave it" in capsys.readouterr().err
    job_record.record(replace(job := job_record.newest(workdir), id=""))  # its submission was cut off
    assert launch.main(["--on=local", f"--workdir={workdir}", "--", "true"]) == 2
    assert "has a job that is running" in capsys.readouterr().err and job_record.newest(workdir).id == job.id
    told("cancel", workdir, "--now")
    wait_for(lambda: state(workdir) != "running")
    assert state(workdir) == "cancelled" and not (workdir / "saved").exists()
    (workdir / "jobs" / "1" / "stop").unlink()
    told("why", workdir)
    assert capsys.readouterr().out == ("it has failed: it was killed, or the machine was started again\n"
                                       "the end of what it printed (jaxtrain jobs logs):\n  attempt a b True\n")


def test_a_job_that_ended_before_anyone_recorded_it_is_found_and_not_running(workdir):
    """As where the sweep that started it was killed, and came back when it had ended."""
    (workdir / "end").write_text("0")
    wait_for(lambda: state(workdir) == "done")
    engine, job = LocalEngine(), job_record.newest(workdir)
    found = replace(job, id=engine.find(job))
    assert found.id not in ("", job.id) and engine.status(found).state == "done"


def test_the_checkout_and_its_edits_are_recorded(tmp_path, monkeypatch, capsys):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=tmp_path, check=True,
                       capture_output=True)

    git("init")
    (tmp_path / "model.py").write_text("a = 1\n")
    git("add", "model.py")
    git("commit", "-m", "begun")
    (tmp_path / "model.py").write_text("a = 2\n")
    (tmp_path / "own config.py").write_text("b = 3\n")
    monkeypatch.chdir(tmp_path)
    assert launch.main(["--on=local", "--workdir=work", "--", "true"]) == 0
    job = job_record.newest(tmp_path / "work")
    assert len(job.about["commit"]) == 40 and job.directory == str(tmp_path)
    patch = (job.folder / "checkout.patch").read_text()
    assert "+a = 2" in patch and "b = 3" not in patch and job.about["untracked"] == ["own config.py"]
    wait_for(lambda: state(tmp_path / "work") == "done")


def test_a_config_is_read_before_it_is_submitted(tmp_path, capsys):
    assert launch.main(["configs/gpt.py:tiny", "--on=local", f"--workdir={tmp_path}", "--config.train.stepz=3"]) == 2
    assert "train.stepz: there is no such key" in capsys.readouterr().err
    fewer = ["--on=slurm", f"--workdir={tmp_path}", "--nodes=2", "--min_nodes=1"]
    assert launch.main(["configs/gpt.py:tiny", *fewer]) == 2
    assert "min_nodes: the config does not allow fewer nodes" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert launch.main(["configs/gpt.py:tiny", "--on=local", f"--workdir={tmp_path}", "--dry_run"]) == 0
    said = "-m jaxtrain supervise --processes=1 --max_restarts=3 -- --config=configs/gpt.py:tiny"
    assert said in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_an_array_is_a_job_for_each_number(tmp_path, capsys):
    def launched(*flags: str) -> int:
        return launch.main(["--on=local", *flags, "--", "echo", "{task}"])

    assert launched(f"--workdir={tmp_path}/of-{{task}}", "--array=1-2,5") == 0
    for task in "125":
        wait_for(lambda task=task: state(tmp_path / f"of-{task}") == "done")
        assert job_record.newest(tmp_path / f"of-{task}").output.read_text() == f"{task}\n"
    assert launched(f"--workdir={tmp_path}/one") == 0
    wait_for(lambda: state(tmp_path / "one") == "done")
    assert job_record.newest(tmp_path / "one").output.read_text() == "{task}\n"
    for flags, message in (((f"--workdir={tmp_path}/x", "--array=1-2"), "the jobs of an array need one each"),
                           ((f"--workdir={tmp_path}/x-{{task}}",), "{task} has a meaning with --array only"),
                           ((f"--workdir={tmp_path}/x-{{task}}", "--array=3-1"), "3-1 are 0 jobs"),
                           ((f"--workdir={tmp_path}/x-{{task}}", "--array=a"), "'a' is not a list of numbers")):
        capsys.readouterr()
        assert launched(*flags) == 2 and message in capsys.readouterr().err
