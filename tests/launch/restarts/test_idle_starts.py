"""A job that is started again and again without a new step ends, on every engine."""

import json

import pytest

from jaxtrain import main
from jaxtrain.commands import jobs
from jaxtrain.distributed import exit_codes
from jaxtrain.launch import job_record as records
from jaxtrain.launch.job_engines import engine_of
from jaxtrain.launch.job_spec import JobSpec
from jaxtrain.launch.restarts import idle_starts, restart_history


def wrote(workdir, step: int) -> None:
    with open(workdir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")


def started(workdir, **more: str) -> bool:
    """Whether a start goes on."""
    try:
        idle_starts.check(workdir, {idle_starts.VARIABLE: f"{workdir / 'starts.json'}"} | more)
        return True
    except exit_codes.RunExit as end:
        assert end.code == exit_codes.STOPPED and "10 starts in a row have completed no new step (the last one is " \
            "step 4)" in f"{end}"
        return False


def test_only_starts_in_a_row_without_a_new_step_count(tmp_path):
    for step in range(1, 5):  # each of these completes one
        assert all(started(tmp_path) for _ in range(idle_starts.MOST))
        wrote(tmp_path, step)
    assert all(started(tmp_path) for _ in range(idle_starts.MOST))
    assert not started(tmp_path)
    assert started(tmp_path)  # whoever starts it by hand afterwards is not refused at once


def test_a_step_that_only_a_checkpoint_tells_of_counts(tmp_path):
    """The metrics are written every log_every steps; a run that is told to stop saves between them."""
    for step in range(3):
        (tmp_path / "checkpoints" / f"{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"{step + 7}.deleted").mkdir()
        assert started(tmp_path)
    assert idle_starts.read(tmp_path / "starts.json") == {"starts": 3, "idle": 0, "step": 2}


def test_steps_that_are_done_again_do_not_count(tmp_path):
    wrote(tmp_path, 4)
    assert started(tmp_path)
    for _ in range(idle_starts.MOST - 1):
        (tmp_path / "metrics.jsonl").unlink()
        wrote(tmp_path, 3)
        assert started(tmp_path)
    assert not started(tmp_path)


@pytest.mark.parametrize("content", [None, "", "{", '{"starts": "x"}', "[]"])
def test_a_damaged_count_begins_again(tmp_path, content):
    if content is not None:
        (tmp_path / "starts.json").write_text(content)
    assert started(tmp_path) and idle_starts.read(tmp_path / "starts.json")["starts"] == 1


def test_others_do_not_count(tmp_path):
    assert started(tmp_path, JAX_PROCESS_ID="1") and not (tmp_path / "starts.json").exists()
    idle_starts.check(tmp_path, {})
    (tmp_path / "full").symlink_to(tmp_path / "nowhere" / "x")
    idle_starts.check(tmp_path, {idle_starts.VARIABLE: f"{tmp_path}/nowhere/starts.json"})  # as on a full disk


def test_a_run_ends_before_it_looks_for_devices_or_its_config(tmp_path, monkeypatch, capsys):
    (tmp_path / "starts.json").write_text('{"starts": 12, "idle": 9, "step": 4}')
    monkeypatch.setenv(idle_starts.VARIABLE, f"{tmp_path}/starts.json")
    assert main.main(["--config=there/is/none.py", f"--workdir={tmp_path}"]) == exit_codes.STOPPED
    assert "10 starts in a row have completed no new step" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["slurm", "kubernetes", "ray", "skypilot", "dstack"])
def test_every_engine_has_the_starts_counted(tmp_path, engine):
    """Locally the supervisor counts them. A Ray job has the variable from its driver."""
    spec = JobSpec(image="x", mounts={f"{tmp_path}": "pvc:x" if engine == "kubernetes" else "x"}) if engine in (
        "kubernetes", "skypilot", "dstack") else JobSpec()
    job = records.Job(tmp_path / "jobs" / "1", engine, "name", ["python", "-m", "jaxtrain.main"], "/", spec)
    rendered = engine_of(engine).render(job)
    if engine == "ray":
        assert json.loads(rendered["plan.json"])["counted"] is True
    else:
        (text,) = rendered.values()
        assert idle_starts.VARIABLE in text and f"{tmp_path}/jobs/1/starts.json" in text


def test_show_and_why_tell_of_restarts_and_the_last_error(tmp_path, monkeypatch, capsys):
    job = records.Job(records.new_folder(tmp_path), "ray", "name", ["python", "-m", "jaxtrain.main"], "/", JobSpec(),
                      id="x:http://nowhere")
    records.record(job)
    (job.folder / "ended.json").write_text('{"status": 1}')
    (job.folder / "restarts.jsonl").write_text('{"time": 1000, "status": 76, "process": 0}\n'
                                               '{"time": 2000, "status": null, "process": 1}\n{"time"')
    (job.folder / "starts.json").write_text('{"starts": 4, "idle": 2, "step": 30}')
    job.output.write_text("step 30\nTraceback (most recent call last):\nValueError: 7 is odd\n"
                          "process 1 of 2 was the first to end early, with status 1\nsrun: error: n1: task 1: Exited\n")
    for what in ("show", "why"):
        assert jobs.main([what, f"{tmp_path}"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "3; the last one because process 1 was lost with its machine at 1970-01-01" in said
        assert "2 starts in a row without a new step after step 30" in said
        assert "ValueError: 7 is odd" in said
    (job.folder / "restarts.jsonl").unlink()
    (job.folder / "starts.json").unlink()
    (job.folder / "ended.json").write_text('{"status": 0}')
    assert jobs.main(["show", f"{tmp_path}"]) == 0
    assert "restarts" not in (said := capsys.readouterr().out) and "odd" not in said  # of a job that went well


@pytest.mark.parametrize(("printed", "failed", "error"), [
    ("attempt 0\n", False, ""), ("attempt 0\n", True, "attempt 0"),
    ("ValueError: 7\nthe end\n", False, "ValueError: 7"),
    ("  | data.source: there is none\n", True, "data.source: there is none")])
def test_only_a_job_that_failed_has_its_last_line_as_its_error(tmp_path, printed, failed, error):
    job = records.Job(records.new_folder(tmp_path), "slurm", "name", ["x"], "/", JobSpec())
    job.output.write_text(printed)
    assert restart_history.last_error(job, failed) == error


def test_a_job_on_this_machine_has_its_restarts_from_the_supervisor(tmp_path):
    job = records.Job(tmp_path / "jobs" / "1", "local", "name", ["x"], "/", JobSpec(), submitted=50.0)
    (tmp_path / "events.jsonl").write_text("".join(json.dumps({"time": when, "kind": kind, "why": why}) + "\n" for (
        when, kind, why) in [(10, "restart", "another job"), (60, "restart", "process 0 crashed"), (70, "saved", "")]))
    found = restart_history.of(job)
    assert found.count == 1 and found.reason.startswith("process 0 crashed at 1970-01-01 ")
