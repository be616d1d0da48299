"""A slow process is named, after some windows and not before; a healthy one is not."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from jaxtrain.observe.events import events
from jaxtrain.resilience import stragglers
from jaxtrain.resilience.stragglers import RUNNING, Judge, Slow, Window, compare
from tests.tiny import free_address, virtual_devices

ROOT = Path(__file__).parents[2]


def window(data=0.001, busy=0.002, probe=(0.010, 0.010), step=0.1, kind="chip", first=0):
    devices = {str(first + i): seconds for i, seconds in enumerate(probe)}
    return Window(7, "somewhere", step, data, busy, devices, kind)


def test_equals_are_equal():
    ratios = [slow.ratio for slow in compare({process: window() for process in range(4)}).values()]
    assert ratios == [1.0] * 4


@pytest.mark.parametrize("slow, ratio, why", [
    (window(data=0.051), 2.0, "it waits for data"),
    (window(busy=0.022), 1.25, "its host is busy"),
    (window(probe=(0.010, 0.013)), 1.3, "its device 1 computes slowly"),
    (window(data=0.5), 1000, "it waits for data"),  # more than there is: the clock jumped
])
def test_what_makes_one_slow(slow, ratio, why):
    found = compare({0: window(), 1: slow, 2: window(), 3: window()})
    assert found[1].ratio == pytest.approx(ratio) and found[1].why == why
    assert all(found[process].ratio < 1.05 for process in (0, 2, 3))


def test_short_waits_are_no_ratio():
    """A hundred times the others' wait is nothing where it is a thousandth of the step."""
    assert compare({0: window(data=1e-6), 1: window(data=1e-4)})[1].ratio < 1.01


def test_two_know_who_of_them():
    found = compare({0: window(data=0.05), 1: window(data=0.0)})
    assert found[0].ratio == pytest.approx(2) and found[1].ratio < 1.1


def test_other_kinds_of_devices_are_not_compared():
    found = compare({0: window(), 1: window(probe=(0.1, 0.1), kind="old")})
    assert found[1].ratio == 1.0
    assert compare({0: window(probe=(0.01, 0.01, 0.02))})[0].ratio == pytest.approx(2)  # one process: its own devices
    assert compare({0: window(probe=(0.01,))}) == {}  # nobody to compare with


def test_named_after_some_windows_running_and_once():
    judge, slow, well = Judge(), Slow(2.0, "why"), Slow(1.1, "")
    assert judge.changes({0: well, 1: slow}) == []
    assert judge.changes({0: well, 1: well}) == []  # an interruption: counting begins again
    for _ in range(RUNNING - 1):
        assert judge.changes({0: well, 1: slow}) == []
    assert judge.changes({0: well, 1: slow}) == [(1, True, slow)]
    for _ in range(2 * RUNNING):
        assert judge.changes({0: well, 1: slow}) == []
    for _ in range(RUNNING - 1):
        assert judge.changes({0: well, 1: well}) == []
    assert judge.changes({0: well, 1: well}) == [(1, False, well)]


def test_one_process_on_cpu_is_not_measured(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(stragglers.time, "time", lambda: clock[0])
    with stragglers.Stragglers(tmp_path, 60.0) as alone:
        for clock[0] in (0.0, 61.0, 122.0):
            alone.step({}, 0.0, 0.0)
        assert alone.fields == {}
        assert "stragglers" not in {thread.name for thread in threading.enumerate()}


def test_one_process_with_several_devices(tmp_path, monkeypatch, capfd):
    """One of a machine's eight accelerators may be throttled: made windows, the real thread."""
    monkeypatch.setattr(stragglers.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(stragglers, "_Probe", lambda: type("Probe", (), {
        "seconds": lambda self: {"0": 0.01, "1": 0.01, "2": 0.02, "3": 0.01}})())
    clock = [0.0]
    monkeypatch.setattr(stragglers.time, "time", lambda: clock[0])
    with stragglers.Stragglers(tmp_path, 0.01) as watch:
        for _ in range(RUNNING + 2):
            clock[0] += 0.02
            watch.step({}, 0.0, 0.0)
            while watch._queue.qsize():
                time.sleep(0.001)
        end = stragglers.time.monotonic() + 60
        while not events(tmp_path) and stragglers.time.monotonic() < end:
            time.sleep(0.001)
    assert watch.fields["slowest_ratio"] == pytest.approx(2)
    [event] = events(tmp_path)
    assert (event["kind"], event["slow_process"], event["why"]) == ("straggler", 0, "its device 2 computes slowly")
    assert "is 2.00 times as slow as its peers: its device 2 computes slowly" in capfd.readouterr().err


STEPS = 20
SLOW = """
import itertools, sys, threading, jax
from jaxtrain.main import main
from jaxtrain.distributed.coordination import Board
from jaxtrain.resilience import stragglers

class Clock:  # so that it does not matter how busy this machine is
    now = 0.0
    time = perf_counter = staticmethod(lambda: Clock.now)

steps, compared = itertools.count(1), threading.Event()

def step(self, metrics, waited, busy, real=stragglers.Stragglers.step):
    Clock.now += 1  # a window
    before = self._window
    real(self, metrics, 0.75 if next(steps) <= {half} and jax.process_index() == 1 else 0.001, 0.0)
    if before != self._window and before:  # a window has ended: what it says is known before the next step
        compared.wait(600)
        compared.clear()

def after(of, name, last):
    real = getattr(of, name)
    def wrapped(self, *given):
        real(self, *given)
        if last():
            compared.set()
    setattr(of, name, wrapped)

after(Board, "publish", lambda: jax.process_index() != 0)
after(stragglers.Stragglers, "_tell", lambda: True)
stragglers.time, stragglers.Stragglers.step, stragglers.FACTOR = Clock, step, 2
stragglers._Probe.seconds = lambda self: {{"0": 0.01}}  # these cores compute whatever else runs here, too
sys.exit(main())
"""


@pytest.mark.exhaustive
def test_a_process_with_slow_data(tmp_path, forked):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n} of a text that is long enough\n" for n in range(500)))
    coordinator = free_address()
    words = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "mesh.data=2",
             "train.eval_batches=1", "data.global_batch_size=4", f"train.steps={STEPS}", "train.eval_every=0",
             "checkpoint.every=0", f"data.source={text}", "resilience.probe_every=1",
             "resilience.check_every=0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": virtual_devices(1)}
    started = [forked.start(
        ["-c", SLOW.format(half=STEPS // 2), f"--config={ROOT}/configs/gpt.py:tiny",
         *(f"--config.{word}" for word in words), f"--coordinator={coordinator}", "--num_processes=2",
         f"--process_id={i}", f"--workdir={tmp_path}/work"], ROOT, environment) for i in range(2)]
    try:
        outputs = [process.communicate(timeout=900)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    told = [(event["kind"], event["slow_process"]) for event in events(tmp_path / "work")
            if event["kind"].startswith("straggler")]
    assert told == [("straggler", 1), ("straggler_recovered", 1)], outputs[0]
    assert "it waits for data" in outputs[0], events(tmp_path / "work")
    assert "keeps up again" in outputs[0]
    lines = [json.loads(line) for line in (tmp_path / "work" / "metrics.jsonl").read_text().splitlines()]
    assert {line["slowest_process"] for line in lines if line.get("slowest_ratio", 1) > 1.5} == {1}
    assert max(line.get("data_wait_max_s", 0) for line in lines) > 0.1
