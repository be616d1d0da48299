"""A real run under the supervisor, with other numbers of processes on the way: the numbers of an undisturbed one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.main import main
from jaxtrain.observe.events import events
from tests.launch.waiting import LIMIT
from tests.tiny import tiny_flags, virtual_devices

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("cache")  # programs are compiled once
STEPS, ROWS = 48, 24
TINY = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.eval_batches=2",
        f"data.global_batch_size={ROWS}", f"train.steps={STEPS}", "train.eval_every=0", "checkpoint.every=4",
        "resilience.check_every=0"]
# Training that takes its time, and writes down which row of which step each of its devices was given. The end of it
# waits for a file, or until it is told to stop.
TRAIN = """
import hashlib, os, sys, threading, time
import jax
from jaxtrain.main import main
from jaxtrain.trainer.shutdown import Interrupt
from tests.each_batch import at_each_batch

file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
go, seconds, told = sys.argv.pop(1) + ".go", float(sys.argv.pop(1)), threading.Event()

def received(self, number, frame, before=Interrupt._received):
    told.set()
    before(self, number, frame)

def noted(step, place):
    time.sleep(seconds)
    while step > 30 and not os.path.exists(go) and not told.is_set():
        time.sleep(0.05)
    batch = place()
    lines = []
    for shard in batch["tokens"].addressable_shards:
        for row, tokens in zip(range(*shard.index[0].indices(batch["tokens"].shape[0])), jax.device_get(shard.data)):
            lines.append(f"{step} {row} {hashlib.sha256(tokens.tobytes()).hexdigest()[:16]}\\n")
    os.write(file, "".join(lines).encode())
    return batch

Interrupt._received = received
at_each_batch(noted)
sys.exit(main())
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return tiny_flags(tmp_path_factory, TINY, lines=2000)


def told(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{key: line.get(key) for key in ("step", "loss", "grad_norm", "eval_loss", "tokens")} for line in lines]


def given(file):
    """(step, row) -> hashes of its tokens, over all attempts."""
    found = {}
    for line in file.read_text().splitlines():
        step, row, tokens = line.split()
        found.setdefault((int(step), int(row)), set()).add(tokens)
    return found


@pytest.mark.slow
def test_two_one_two_one(flags, tmp_path, forked):
    """The first is lost by kill -9, and taken back by a file; then the other one is sent away by it."""
    (tmp_path / "train.py").write_text(TRAIN)
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
                   "XLA_FLAGS": virtual_devices(1)}
    (tmp_path / "calm.txt.go").touch()
    alone = [f"{tmp_path}/train.py", f"{tmp_path}/calm.txt", "0", *flags, f"--workdir={calm}"]
    assert forked(alone, ROOT, environment, timeout=LIMIT).returncode == 0

    command = [sys.executable, "-m", "jaxtrain", "supervise", "--processes=2", "--min_processes=1", "--lost_after=1",
               "--program", sys.executable, str(tmp_path / "train.py"), str(tmp_path / "stormy.txt"), "0.3", "--",
               *flags, f"--workdir={stormy}"]
    with open(tmp_path / "err.txt", "w") as err:
        supervisor = subprocess.Popen(command, env=environment, stderr=err)

    def attempt(slots, beyond):
        """Wait until just these train, and are beyond a step; the number of their attempt."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end and supervisor.poll() is None:
            starts = [event for event in events(stormy) if event["kind"] == "attempt"]
            if starts and starts[-1]["slots"] == slots and told_of(stormy) > max(beyond, starts[-1]["step"]):
                return starts[-1]["attempt"]
            time.sleep(0.2)
        pytest.fail(f"no attempt of {slots}:\n{(tmp_path / 'err.txt').read_text()}")

    def told_of(workdir):
        lines = told(workdir) if (workdir / "metrics.jsonl").exists() else ()
        return lines[-1]["step"] if lines else 0

    try:
        attempt([0, 1], 5)
        os.kill(process_of(supervisor.pid, "--process_id=0"), signal.SIGKILL)
        attempt([1], 8)
        (stormy / "processes").write_text("2")
        attempt([0, 1], 12)
        (stormy / "processes").write_text("1")
        attempt([0], 16)
        (tmp_path / "stormy.txt.go").touch()
        assert supervisor.wait(LIMIT) == 0
    finally:
        supervisor.kill()
        supervisor.wait()

    ours, theirs = told(stormy), told(calm)
    assert len(ours) == len(theirs) == STEPS + 1
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(*[[value for value in line.values() if value is not None] for line in (our, their)],
                                   rtol=1e-6)
    rows = given(tmp_path / "stormy.txt")
    assert rows == given(tmp_path / "calm.txt") and len(rows) == STEPS * ROWS
    assert all(len(hashes) == 1 for (step, _), hashes in rows.items() if step > 1)  # evaluation has batches 0 and 1
    meshes = [(event["mesh"], event["accumulation"]) for event in events(stormy) if event["kind"] == "elastic"]
    assert meshes == [("data=1", 2)] * 2
    said = (tmp_path / "err.txt").read_text()
    assert "process 0 was killed by SIGKILL" in said and said.count("recovered in ") == 3
    worst = max(abs(our["loss"] / their["loss"] - 1) for our, their in zip(ours, theirs, strict=True) if our["loss"])
    print(f"\nlargest relative difference of {STEPS} losses: {worst:.1e}")
    print("\n".join(line for line in said.splitlines() if line.startswith(("supervise:", "elastic:"))))


def process_of(parent, word):
    """The child of this parent that was started with this word."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent and word in words:
                    return int(folder.name)
            except (OSError, ValueError):
                continue
    raise AssertionError(f"no process with {word}")


@pytest.mark.exhaustive
def test_fewer_devices_without_a_supervisor(flags, tmp_path, capsys):
    """Refused, unless resilience.elastic says otherwise; then it is said, and recorded."""
    mesh = ["--config.mesh.data=4", "--config.mesh.tensor=4", "--config.train.steps=2", f"--workdir={tmp_path}"]
    assert main([*flags, *mesh]) == 2
    assert "needs 16 devices and there are 8" in capsys.readouterr().err
    assert main([*flags, *mesh, "--config.resilience.elastic=true"]) == 0
    assert "data=4,tensor=4 was configured, but there are 8 devices: the run continues with data=2,tensor=4 and " \
           "train.accumulation=2" in capsys.readouterr().err
    (event,) = (event for event in events(tmp_path) if event["kind"] == "elastic")
    assert event["kind"] == "elastic" and event["devices"] == 8
