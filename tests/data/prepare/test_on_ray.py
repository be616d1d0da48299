"""A real Ray cluster on this machine: the bytes of one run, whatever dies, and mistakes in one line."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jaxtrain.commands.prepare import main
from jaxtrain.data.prepare import tasks
from jaxtrain.data.prepare.on_ray import Ray
from jaxtrain.data.prepare.prepare import Options, prepare
from jaxtrain.data.prepare.tasks import tokenize_shard
from jaxtrain.errors import UserError
from tests.data.prepare.test_on_slurm import files, write

pytest.importorskip("ray", reason="ray comes with the extra .[test-all]")
ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_killed_workers_and_a_mistake_on_one_cluster(tmp_path):
    """The test has a process of its own, since Ray changes the process that it is started from."""
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # Ray's sockets need a short path
        environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": short}
        code = f"from tests.data.prepare.test_on_ray import *; chores({str(tmp_path)!r})"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True, capture_output=True,
                              timeout=900)  # several starts of Ray, on a busy machine
    assert done.returncode == 0 and "all well" in done.stdout, done.stdout + done.stderr


def chores(folder: str) -> None:
    """Assert everything after one start of a cluster."""
    os.chdir(folder)
    write(Path("a.jsonl"))
    options = Options(eval_fraction=0.1, task_bytes=3000)
    want, lines = prepare(["a.jsonl"], "want", options), []
    got = prepare(["a.jsonl"], "got", options, Ray("local", at_once=2), lines.append)
    assert files(got.path) == files(want.path)
    assert lines[-1].startswith("tokens: 7 of 7 tasks, 100.0%")

    os.chdir(want.path)  # the workers stay where they are
    options = Options(eval_fraction=0.1, task_bytes=3000, deduplicate=True)
    want = prepare(["../a.jsonl"], "../want-2", options)
    got = prepare(["../a.jsonl"], "../got-2", options,
                  lambda do, calls: Ray()(interrupted, [(do, *call) for call in calls]))
    assert {path.name for path in Path("..").glob("*.died")} == {"0.died", "1.died", "2.died"}
    assert files(got.path) == files(want.path)
    with pytest.raises(UserError, match=r"--engine: the worker of task 7 died 4 times.*; run again with smaller"):
        list(Ray()(dies, [(7,)]))

    with open("../a.jsonl", "a") as file:
        file.write("{")
    with pytest.raises(UserError, match="is not a JSON object") as mistake:
        prepare(["../a.jsonl"], "bad", Options(task_bytes=3000), Ray())
    assert str(mistake.value).count("\n") == 0
    with pytest.raises(ZeroDivisionError):  # a mistake of ours is told with its place
        list(Ray()(divides, [(1,)]))
    print("all well")


def interrupted(do, number: int, *rest) -> int:
    """A worker dies between its shards and its ledger."""
    marker = Path(f"../{number}.died")
    if do is tokenize_shard and number < 3 and not marker.exists():
        marker.touch()
        tasks.atomic_files.write_json = dies  # it has no other worker to harm
    return do(number, *rest)


def dies(*_) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def divides(number: int) -> int:
    return number // 0


def test_the_command_line_and_mistakes_in_it(tmp_path, monkeypatch, capsys):
    flags = [f"--input={write(tmp_path / 'a.jsonl')}", f"--output={tmp_path / 'out'}", "--engine=ray"]
    assert main([*flags, "--ray_address=127.0.0.1:1"]) == 2
    error = capsys.readouterr().err
    assert "--ray_address: no cluster was found" in error and error.count("\n") == 1
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(flags) == 2
    assert "'.[ray]'" in capsys.readouterr().err
