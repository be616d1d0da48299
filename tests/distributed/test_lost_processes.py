"""Real processes on loopback, one of which is killed, fails, hangs or never comes: the others end, by name."""

import contextlib
import functools
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from jaxtrain.distributed import exit_codes
from jaxtrain.observe import events
from tests.tiny import free_address, tiny_flags, virtual_devices

ROOT = Path(__file__).parents[2]
TINY = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.eval_batches=1",
        "data.global_batch_size=8", "train.steps=100000", "optimizer.schedule=constant", "train.progress=false",
        "resilience.check_every=0"]
# Process 1 does something at a step, and waits before it restores.
RUN = """
import os, sys, time
from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.main import main
from tests.each_batch import at_each_batch

def odd(step, place):
    if os.environ["JAX_PROCESS_ID"] == "1" and step == {at}:
        {what}
    return place()

def late(self, abstract, below=None, restore=CheckpointManager.restore_newest):
    time.sleep({slow} if os.environ["JAX_PROCESS_ID"] == "1" else 0)
    return restore(self, abstract, below)

at_each_batch(odd)
CheckpointManager.restore_newest = late
sys.exit(main())
"""
# The command's work is left out. Process 1 does not end before process 0 has ended and what that causes is done.
COMMAND = """
import os, sys, time
import jax
from jaxtrain.distributed import processes
from jaxtrain.errors import UserError

def late(shutdown=jax._src.distributed.shutdown):
    shutdown()  # waits for the other process, which does this at its exit, too
    peers = processes._peers
    while peers._lines:
        time.sleep(0.01)
    if peers._follower.is_alive():
        peers._follower.join()

def work(*args, **keys):
    {what}

if os.environ["JAX_PROCESS_ID"] == "1":
    jax._src.distributed.shutdown = late
{command}
"""
COMMANDS = {
    "export": """
from jaxtrain.commands import export
export.export = work
sys.exit(export.main(["workdir", "--output=folder"]))""",
    "evaluate": """
from jaxtrain.commands import evaluate
evaluate.Tasks.of, evaluate.evaluate = work, work
sys.exit(evaluate.main(["workdir", "--tasks=mine"]))""",
    "adapters": """
from jaxtrain.commands import adapters
from jaxtrain.hub.adapters import adapter_commands
adapter_commands.export = work
sys.exit(adapters.main(["export", "workdir", "--output=folder"]))""",
    "bench": """
from jaxtrain.commands import bench
bench.measured = lambda *_, **__: work() | {"what": "run"}
bench.shown = lambda record: "measured"
sys.exit(bench.main(["--config=config.py"]))""",
}
DONE = "return {'step': 0}"
NAME = socket.gethostname()


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return tiny_flags(tmp_path_factory, TINY)


@pytest.fixture
def started(forked):
    return functools.partial(_started, forked)


@contextlib.contextmanager
def _started(forked, flags, workdir, processes=2, devices=1, what="pass", at=6, slow=0, of=None, command="",
             **environment):
    """Start processes, with the code `what` in those of `of` (None: all); none is left behind."""
    address, run = free_address(), []
    try:
        for i in range(processes) if of is None else of:
            environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_PROCESS_ID": str(i),
                       "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes),
                       "XLA_FLAGS": virtual_devices(devices), **environment}
            mine = [flag.format(i=i) for flag in flags]
            program = COMMAND.format(what=what, command=COMMANDS[command]) if command else RUN.format(
                what=what, at=at, slow=slow)
            run.append(forked.start(["-c", program, *mine, f"--workdir={workdir}"], ROOT, environ))
        yield run
    finally:
        for process in run:
            process.kill()
            process.wait()


def ended(run, seconds=170):
    """(status, stderr) of each."""
    return [(process.communicate(timeout=seconds)[1], process.returncode)[::-1] for process in run]


def wait_for_steps(run, workdir):
    lines, end = workdir / "metrics.jsonl", time.monotonic() + 150
    while not lines.exists() or lines.stat().st_size < 1000:
        assert time.monotonic() < end
        assert all(process.poll() is None for process in run), ended(run)
        time.sleep(0.1)


@pytest.mark.parametrize("processes, devices, victim", [
    pytest.param(2, 1, 1, marks=pytest.mark.exhaustive), pytest.param(2, 1, 0, marks=pytest.mark.slow),
    pytest.param(4, 2, 2, marks=pytest.mark.exhaustive)])
def test_killed(started, flags, tmp_path, processes, devices, victim):
    with started(flags, tmp_path, processes, devices) as run:
        wait_for_steps(run, tmp_path)
        run[victim].kill()
        ends = ended(run)
    for i, (status, said) in enumerate(ends):
        if i == victim:
            continue
        if victim == 0 and status == -signal.SIGABRT:  # JAX saw it first: it is told of its coordinator, too
            continue
        found = re.search(rf"process {victim} \({re.escape(NAME)}\) is gone( \([^)]*\))?: process {i} ends", said)
        assert status == exit_codes.RESTART and found, said
        assert "Traceback" not in said
    if victim:
        assert {(event["kind"], event["peer"]) for event in events.events(tmp_path)
                if event["kind"].startswith("peer")} == {("peer_lost", victim)}


@pytest.mark.exhaustive
def test_one_fails(started, flags, tmp_path):
    with started(flags, tmp_path, what="raise OSError('the disk is on fire')") as run:
        (status, said), (failed, reason) = ended(run)
    assert failed == 1 and reason.count("OSError: the disk is on fire") >= 1 and "Traceback" in reason
    assert status == exit_codes.RESTART
    assert f"process 1 ({NAME}) failed (OSError: the disk is on fire): process 0" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_one_hangs(started, flags, tmp_path):
    keys = ["--config.resilience.hang_floor=8", "--config.resilience.hang_factor=1"]
    with started([*flags, *keys], tmp_path, what="time.sleep(1000)") as run:
        ends = ended(run)
    assert [status for status, _ in ends] == [exit_codes.RESTART] * 2, ends
    assert all(f"process 1 ({NAME}) did not begin step 7, where the others wait" in said for _, said in ends), ends
    first, second = sorted((tmp_path / "hangs").iterdir(), key=lambda path: path.name.partition("process")[2])
    assert "in odd" in second.read_text() and "in odd" not in first.read_text()


@pytest.mark.exhaustive
def test_one_is_slow_to_begin(started, flags, tmp_path):
    """Gloo's first talk among processes ends after 30 seconds: neither a restore nor a first batch may come to that."""
    keys = [*flags, "--config.train.steps=4", "--config.checkpoint.every=2"]
    with started(keys, tmp_path) as run:
        assert [status for status, _ in ended(run)] == [0, 0]
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    with started(keys, tmp_path, at=2, what="time.sleep(40)", slow=40) as run:
        ends = ended(run)
    assert [status for status, _ in ends] == [0, 0] and "resumed from step 2" in ends[0][1], ends
    assert not any("damaged" in said for _, said in ends)


@pytest.mark.slow
def test_one_has_another_config(started, flags, tmp_path):
    with started([*flags, "--config.train.seed={i}"], tmp_path) as run:
        ends = ended(run)
    line = (f"train.seed: process 0 has 0, process 1 ({NAME}) has 1; "
            "start all processes with the same command and the same installation\n")
    assert ends == [(2, line), (2, line)]


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_one_never_comes(started, flags, tmp_path, who):
    with started(flags, tmp_path, of=[who], JAXTRAIN_JOIN_TIMEOUT="8") as run:
        (status, said), = ended(run)
    reason = ("process 1 cannot reach process 0 at 127", "not all of the 2 processes came to 127")[who == 0]
    assert status == exit_codes.RESTART and said.startswith(f"--coordinator: {reason}")
    assert said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_one_that_ends_later_does_not_take_the_other_for_lost(started, tmp_path, command):
    with started([], tmp_path, what=DONE, command=command) as run:
        ends = ended(run)
    assert [status for status, _ in ends] == [0, 0], ends


@pytest.mark.slow
@pytest.mark.parametrize(("what", "status", "told"), [
    ("raise UserError('--output', 'it is there', 'name another')", 2, "--output: it is there; name another\n"),
    ("raise SystemExit(1)", 1, "")])
def test_a_command_that_stops_in_all_processes_ends_alike(started, tmp_path, what, status, told):
    with started([], tmp_path, what=what, command="export") as run:
        assert ended(run) == [(status, told)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("error", "statuses", "words"), [
    ("UserError('--output', 'it is there', 'name another')", (2, 2), "--output: it is there; name another"),
    ("OSError('the disk is on fire')", (exit_codes.RESTART, 1), "OSError: the disk is on fire")])
def test_an_error_of_one_process_ends_the_command_in_the_other(started, tmp_path, error, statuses, words):
    """The other one waits for it."""
    what = f"processes.meet('work', 1000) if os.environ['JAX_PROCESS_ID'] == '0' else ()\n    raise {error}"
    with started([], tmp_path, what=what, command="export") as run:
        (first, said), (second, told) = ended(run)
    assert (first, second) == statuses and told.rstrip().endswith(words)
    assert f"process 1 ({NAME}) failed (" in said and "Traceback" not in said
