"""Who does the tasks makes no difference; a worker that is killed is told in one line."""

import os
import signal

import pytest

from jaxtrain.data.prepare import engines
from jaxtrain.data.prepare.prepare import Options, begin, main, plan_tasks, prepare, tokenize_shard
from jaxtrain.errors import UserError
from tests.data.prepare.test_on_slurm import files, write


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


def test_tasks_called_one_by_one_are_not_done_again(tmp_path, monkeypatch):
    source, options = [str(write(tmp_path / "a.jsonl"))], Options(eval_fraction=0.1, task_bytes=3000)
    tasks, plan, options = plan_tasks(source, options)
    assert plan_tasks(source, options) == (tasks, plan, options) != plan_tasks(source, Options(eval_fraction=0.2))
    assert begin(tmp_path / "got", options, plan)
    for number in (5, 1, 1, 0, 3, 6, 2, 4):
        assert tokenize_shard(number, tasks[number], tmp_path / "got", options, plan) == number
    with monkeypatch.context() as done:
        done.setattr("jaxtrain.data.prepare.prepare.tokenize_shard", lambda *_: pytest.fail("done again"))
        got = prepare(source, tmp_path / "got", options)
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


def die(number, *_):
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_killed_worker_is_one_line_and_nothing_is_lost(tmp_path, monkeypatch, capsys):
    flags = [f"--input={write(tmp_path / 'a.jsonl')}", f"--output={tmp_path / 'out'}", "--task_bytes=3000",
             "--workers=2"]
    with monkeypatch.context() as broken:
        broken.setattr("jaxtrain.data.prepare.prepare.tokenize_shard", die)
        assert main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("--workers: a worker was killed") and error.count("\n") == 1
    assert main(flags) == 0


def test_nothing_to_do_needs_no_engine(tmp_path):
    assert list(engines.run(die, [], [], tmp_path, Options(), "", 2)) == []
