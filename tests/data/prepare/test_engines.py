"""The choice of engine makes no difference; a worker that is killed is reported in one line."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.commands.prepare import main
from jaxtrain.data.prepare import engines
from jaxtrain.data.prepare.prepare import Options, begin, plan_tasks, prepare, tokenize_shard
from jaxtrain.errors import UserError
from tests.data.prepare.test_on_slurm import files, write
from tests.odd_files import in_time


@pytest.mark.parametrize("deduplicate", [False, True])
def test_an_engine_of_ones_own_gives_the_same_bytes(tmp_path, deduplicate):
    source, done = [str(write(tmp_path / "a.jsonl"))], []

    def backwards(do, calls):
        for call in calls[::-1]:
            done.append(call[0])
            yield do(*call)

    options = Options(eval_fraction=0.1, task_bytes=3000, deduplicate=deduplicate)
    got = prepare(source, tmp_path / "got", options, backwards)
    assert done == [*range(6, -1, -1)] * (2 if deduplicate else 1)
    assert files(got.path) == files(prepare(source, tmp_path / "want", options).path)


def test_tasks_called_one_by_one_are_not_done_again(tmp_path):
    source, options = [str(write(tmp_path / "a.jsonl"))], Options(eval_fraction=0.1, task_bytes=3000)
    tasks, plan, options = plan_tasks(source, options)
    assert plan_tasks(source, options) == (tasks, plan, options) != plan_tasks(source, Options(eval_fraction=0.2))
    assert begin(tmp_path / "got", options, plan)
    for number in (5, 1, 1, 0, 3, 6, 2, 4):
        assert tokenize_shard(number, tasks[number], tmp_path / "got", options, plan) == number
    got = prepare(source, tmp_path / "got", options, say=lambda line: pytest.fail(f"done again: {line}"))
    assert files(got.path) == files(prepare(source, tmp_path / "want", options).path)
    assert not begin(tmp_path / "got", options, plan)
    with pytest.raises(UserError, match="holds another corpus"):
        begin(tmp_path / "got", options, "another plan")


def test_tasks_of_another_plan_touch_nothing(tmp_path):
    source, options = [str(write(tmp_path / "a.jsonl"))], Options(eval_fraction=0.1, task_bytes=3000)
    tasks, plan, options = plan_tasks(source, options)
    begin(tmp_path / "out", options, plan)
    begin(tmp_path / "out", options, "another plan")  # nothing was done yet
    with pytest.raises(UserError, match="another command began"):
        tokenize_shard(0, tasks[0], tmp_path / "out", options, plan)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["unfinished"]


def test_a_machine_with_another_tokenizer_is_found(tmp_path):
    """Here the one of --tokenizer, at the same path, which another process sees changed."""
    source, options = [str(write(tmp_path / "a.jsonl"))], Options(task_bytes=3000)
    tasks, plan, options = plan_tasks(source, options)
    with pytest.MonkeyPatch.context() as there:
        there.setattr("jaxtrain.data.tokenizers.tokenizer.ByteTokenizer.fingerprint", "another")
        begin(tmp_path / "out", options, plan)
        tokenize_shard(2, tasks[2], tmp_path / "out", options, plan)
    with pytest.raises(UserError, match="--tokenizer: bytes differs between machines"):
        prepare(source, tmp_path / "out", options)


DIES = """
import os, signal
def step(document):
    if os.path.exists({kill!r}):
        os.kill(os.getpid(), signal.SIGKILL)
    return document
"""


def test_a_killed_worker_is_one_line_and_nothing_is_lost(tmp_path, monkeypatch, capsys):
    flags = [f"--input={write(tmp_path / 'a.jsonl')}", f"--output={tmp_path / 'out'}", "--task_bytes=3000",
             "--workers=2", "--filters=step_that_dies:step"]
    (tmp_path / "step_that_dies.py").write_text(DIES.format(kill=f"{tmp_path / 'kill'}"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "kill").touch()
    assert main(flags) == 2
    (tmp_path / "kill").unlink()
    error = capsys.readouterr().err
    assert error.startswith("--workers: a worker was killed") and error.count("\n") == 1
    assert main(flags) == 0


WAITS = """
import threading

def waits(text):
    with open({fifo!r}, "w") as fifo:
        print("here", file=fifo, flush=True)
        threading.Event().wait()
"""


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_workers_end_with_a_killed_parent(tmp_path):
    """Each worker reports at a pipe and waits; no end of the pipe, nor of stderr, is open once all of them are gone."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "waits.py").write_text(WAITS.format(fifo=str(fifo)))
    command = [sys.executable, "-m", "jaxtrain", "prepare", f"--input={write(tmp_path / 'a.jsonl')}", "--workers=2",
               f"--output={tmp_path / 'out'}", "--task_bytes=3000", "--filters", "waits:waits"]
    here = Path(__file__).parents[3]
    paths = os.pathsep.join([str(tmp_path), str(here)])
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=here,
                               start_new_session=True, env={**os.environ, "PYTHONPATH": paths})
    try:
        with open(fifo) as reports:
            assert [reports.readline() for _ in range(2)] == ["here\n"] * 2
            started.kill()
            assert in_time(reports.read, 120) == ""  # the end of the pipe: both workers are gone
        # The end of stderr: so is all else that was started, such as a resource tracker.
        assert b"Traceback" not in in_time(started.stderr.read, 120)
    finally:
        with contextlib.suppress(ProcessLookupError):  # they are gone, unless the test fails
            os.killpg(started.pid, signal.SIGKILL)
        started.communicate()


def test_nothing_to_do_needs_no_engine(tmp_path):
    assert list(engines.run(tokenize_shard, [], [], tmp_path, Options(), "", 2)) == []
