"""Real processes, killed and stopped: their ledger adds up to the time that passed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxtrain.observe.goodput import account, incarnations
from tests.tiny import virtual_devices, wait_for_checkpoint

ROOT = Path(__file__).parents[2]
TINY = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.eval_batches=1",
        "data.global_batch_size=8", "train.steps=40", "train.eval_every=0", "train.progress=false",
        "resilience.check_every=0"]
# A run as anybody starts it, except for slow batches, so that kills come in the middle.
RUN = """
import sys, time
from jaxtrain.observe.ledger import Ledger
from tests.each_batch import at_each_batch

at_each_batch(lambda step, place: (time.sleep({seconds}), place())[1])
Ledger.__init__.__kwdefaults__["every"] = 0.1
from jaxtrain.main import main
sys.exit(main())
"""


@pytest.fixture
def flags(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n} of a text that is long enough\n" for n in range(500)))
    return [f"--config={ROOT}/configs/gpt.py:tiny", *(f"--config.{word}" for word in [*TINY, f"data.source={text}"]),
            f"--workdir={tmp_path}/work"]


def start(flags, devices=1, seconds=0.1):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
                   "XLA_FLAGS": virtual_devices(devices)}
    return subprocess.Popen([sys.executable, "-c", RUN.format(seconds=seconds), *flags], env=environment,
                            stderr=subprocess.PIPE, text=True)


def wait_for_step(workdir, step, process):
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        lines = workdir.joinpath("metrics.jsonl").read_text().splitlines() if workdir.exists() and \
            workdir.joinpath("metrics.jsonl").exists() else []
        if lines and json.loads(lines[-1])["step"] >= step:
            return
        time.sleep(0.02)
    pytest.fail(f"it did not come to step {step}: {process.communicate()[1] if process.poll() is not None else ''}")


@pytest.mark.slow
def test_the_ledger_of_a_run_that_is_killed_stopped_and_finished_adds_up(flags, tmp_path):
    """The total is what this test saw from outside, up to the moments between a process and its ledger."""
    every = [*flags, "--config.checkpoint.every=10"]
    began = time.time()
    with start(every) as killed:
        wait_for_step(tmp_path / "work", 17, killed)
        wait_for_checkpoint(tmp_path / "work", 10, killed)
        killed.kill()
    with start(every, seconds=0.3) as stopped:
        wait_for_step(tmp_path / "work", 25, stopped)
        stopped.send_signal(signal.SIGTERM)
        stopped.communicate(timeout=120)
    assert stopped.returncode not in (0, 1)
    ended = time.time()
    time.sleep(2)  # nobody wants it to run
    idle = time.time()
    with start(every) as finished:
        out = finished.communicate(timeout=240)[1]
        done = time.time()
    assert finished.returncode == 0, out
    life = account(incarnations(tmp_path / "work"))
    assert [one.ended for one in life.incarnations] == ["", "stopped", "finished"] and life.failures == 1
    first, last = life.incarnations[0], life.incarnations[-1]
    print(f"seen {done - began:.2f} s, booked {sum(life.seconds.values()):.2f} s: {life.seconds}")
    assert sum(life.seconds.values()) == pytest.approx(last.sign - first.began)
    assert began < first.began < last.sign < done + 0.1  # a process begins and ends outside of its ledger
    assert sum(life.seconds.values()) > 0.5 * (done - began)
    assert life.seconds["idle"] >= idle - ended - 0.1
    assert life.seconds["restart_gap"] > 0 and life.seconds["init"] > 0 and life.seconds["restore"] > 0
    assert life.step == 40 and life.seconds["data_wait"] > 0 < life.seconds["step"]
    # The steps from 10 on were done again; of those done by the first, as many are lost as it told before it died.
    assert life.incarnations[1].resumed == 10
    told = sum(one.lost(min(after.resumed for after in life.incarnations[i + 1:]))
               for i, one in enumerate(life.incarnations[:-1]))
    assert life.seconds["lost_work"] == pytest.approx(told) and told > 0
    # The table is printed before the process signs off, so the last moments are only in the ledger.
    printed = float(re.search(r"goodput ([0-9.]+)%", out)[1])
    assert printed == pytest.approx(100 * life.goodput, abs=0.3) and "(3 starts, 1 failed)" in out
