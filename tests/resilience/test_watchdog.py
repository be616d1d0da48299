"""A run that hangs ends, and says where: real processes that stop making progress."""

import functools
import json
import os
import signal
import time
from pathlib import Path

import pytest

from jaxtrain.config.schema import ResilienceConfig
from jaxtrain.distributed import exit_codes
from jaxtrain.errors import UserError
from jaxtrain.observe import events
from jaxtrain.resilience import watchdog
from jaxtrain.resilience.watchdog import Watchdog
from tests.odd_files import ODD, WRONG, in_time

ROOT = Path(__file__).parents[2]
QUICK = """
import ctypes, os, signal, sys, threading, time
from jaxtrain.config.schema import ResilienceConfig
from jaxtrain.resilience import watchdog

watchdog.TICK, watchdog.GRACE = 0.05, {grace}
config = ResilienceConfig(hang_factor=2, hang_floor={floor}, start_limit={start_limit})

def steps(dog):
    for step in range(1, 8):
        dog.begin(step)
        time.sleep(0.01)
        dog.completed(step)
    dog.begin(8)

def the_hang():
    {hang}

with watchdog.Watchdog(sys.argv[1], config) as dog:
    {body}
print("went on")
"""


@pytest.fixture
def run(forked):
    return functools.partial(_run, forked)


def _run(forked, workdir, body="with dog.training(): steps(dog); the_hang()", hang="time.sleep(100)", start_limit=100.0,
        grace=60.0, floor=1.0):
    code = QUICK.format(body=body, hang=hang, start_limit=start_limit, grace=grace, floor=floor)
    return forked.start(["-c", code, workdir], ROOT, {**os.environ})


def end(process):
    out, error = process.communicate(timeout=90)
    return process.returncode, out, error


def test_a_hang_between_steps(run, tmp_path):
    events.record(tmp_path, "something_before")
    status, out, error = end(run(tmp_path))
    assert (status, out) == (exit_codes.RESTART, "")
    assert "process 0 (" in error and "hangs in phase 'train': no progress for" in error and "in the_hang" in error
    (stacks,) = (tmp_path / "hangs").iterdir()
    text = stacks.read_text()
    assert f"stacks of all threads: {stacks}" in error
    for part in ("in the_hang", "newest step begun 8, completed 7", "something_before", "memory: host peak",
                 "all threads:", "Current thread", "'phase': 'train'"):
        assert part in text, part
    told = events.events(tmp_path)[-1]
    assert (told["kind"], told["phase"], told["step"], told["begun"]) == ("hang", "train", 7, 8)
    assert watchdog.heartbeats(tmp_path)[0]["step"] == 7


@pytest.mark.slow
def test_a_hang_before_the_first_step_has_its_own_limit(run, tmp_path):
    assert end(run(tmp_path, body="the_hang()", start_limit=1.0))[0] == exit_codes.RESTART
    assert end(run(tmp_path, body="the_hang()", hang="time.sleep(3)"))[:2] == (0, "went on\n")


@pytest.mark.slow
def test_an_evaluation_has_the_limit_of_the_start(run, tmp_path):
    body = "with dog.training(), dog.phase('evaluation'): steps(dog); the_hang()"
    assert end(run(tmp_path, body=body, hang="time.sleep(3)"))[:2] == (0, "went on\n")


@pytest.mark.slow
def test_native_code_that_keeps_the_lock(run, tmp_path):
    """No Python thread can run then; the timer in C can."""
    status, out, error = end(run(tmp_path, hang="ctypes.PyDLL(None).sleep(100)", start_limit=10.0, grace=2.0))
    assert (status, out) == (1, "") and "in the_hang" in error


@pytest.mark.slow
def test_an_error_whose_closing_hangs_is_not_lost(run, tmp_path):
    body = "import contextlib\n    with contextlib.ExitStack() as stack, dog.training():\n" \
           "        stack.callback(the_hang); steps(dog); raise OSError('the real reason')"
    # The callback is pushed outside of training(), so it runs behind it, as the checkpoints' closing does.
    status, _, error = end(run(tmp_path, body=body))
    assert status == exit_codes.RESTART and "hangs in phase 'failure'" in error and "OSError: the real reason" in error


@pytest.mark.slow
def test_a_process_that_was_stopped_did_not_hang(run, tmp_path):
    process = run(tmp_path, floor=3.0, hang="time.sleep(0.4); os.kill(os.getpid(), signal.SIGSTOP); time.sleep(0.3)")
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.05)
    time.sleep(4)
    process.send_signal(signal.SIGCONT)
    assert end(process)[:2] == (0, "went on\n")


def test_a_signal_shows_the_stacks_and_changes_nothing(tmp_path, capfd):
    with Watchdog(tmp_path, ResilienceConfig()):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert "in test_a_signal_shows_the_stacks_and_changes_nothing" in capfd.readouterr().err


def test_heartbeats(tmp_path):
    with Watchdog(tmp_path, ResilienceConfig()) as dog, dog.training():
        dog.begin(4)
        dog.completed(3)
        dog._beat_once()
        beat = watchdog.heartbeats(tmp_path)[0]
        assert (beat["step"], beat["begun"], beat["phase"], beat["pid"]) == (3, 4, "train", os.getpid())
    assert watchdog.heartbeats(tmp_path)[0]["phase"] == "ended"
    (tmp_path / "heartbeats" / "process-1").write_text('{"step"')  # of a writer that is not ours
    assert list(watchdog.heartbeats(tmp_path)) == [0]


def test_limits(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(watchdog.time, "perf_counter", lambda: now)
    dog = Watchdog(tmp_path, ResilienceConfig(hang_factor=20, hang_floor=120, start_limit=3600))
    assert dog.limit() == 3600
    with dog.training():
        assert dog.limit() == 3600  # the first steps
        for step in range(10):
            now += 10.0 if step % 3 else 100.0  # an evaluation now and then
            dog.completed(step)
        assert dog.limit() == 200
        with dog.phase("save"):
            assert dog.limit() == 3600
        assert dog.limit() == 200
        for step in range(64):
            now += 0.1
            dog.completed(step)
        assert dog.limit() == 120
    assert dog.limit() == 3600
    with pytest.raises(OSError), dog.training():
        raise OSError
    assert dog.limit() == 120


def beat(begun, phase="train", time=100.0, host="node"):
    return {"begun": begun, "step": begun - 1, "phase": phase, "time": time, "host": host}


@pytest.mark.parametrize("beats, expected", [
    ({0: beat(5)}, "there is no other process to compare with"),
    ({0: beat(5), 1: beat(4, host="slow"), 2: beat(5)}, "process 1 (slow) did not begin step 5, where the others wait"),
    ({0: beat(5), 1: beat(5), 2: beat(5)}, "all processes began step 5: look at the devices and the network between"),
    ({0: beat(5), 1: beat(5, time=60.0, host="gone"), 2: beat(5)}, "process 1 (gone) stopped writing heartbeats"),
    ({0: beat(5), 2: beat(5)}, "process 1 (host unknown) stopped writing heartbeats"),
    ({0: beat(5), 1: beat(5, "save"), 2: beat(5), 7: beat(1)}, "process 1 (node) is in phase 'save', the others in"),
], ids=["one", "behind", "all", "silent", "missing", "phase"])
def test_who_did_not_arrive(beats, expected):
    assert expected in watchdog.laggards(beats, 1 if len(beats) == 1 else 3)


def test_nonsense_is_refused():
    for key, value in {"hang_factor": -1, "hang_floor": 0, "start_limit": 0}.items():
        with pytest.raises(UserError, match=f"resilience.{key}"):
            ResilienceConfig(**{key: value})
    json.dumps(ResilienceConfig().__dict__)


@pytest.mark.parametrize("make", [*ODD, *WRONG], ids=lambda make: make.__name__)
def test_whatever_lies_in_place_of_a_heartbeat(tmp_path, make):
    (tmp_path / "heartbeats").mkdir()
    make(tmp_path / "heartbeats" / "process-0")
    make(tmp_path / "heartbeats" / "process-x")
    assert in_time(lambda: watchdog.heartbeats(tmp_path)) == {}


@pytest.mark.parametrize("content", ['{"pid": "x"}', '{"time": null}', '{"host": 3}', '{"begun": 1.5}'])
def test_a_heartbeat_of_another_form_is_left_out(tmp_path, content):
    (tmp_path / "heartbeats").mkdir()
    (tmp_path / "heartbeats" / "process-0").write_text(content)
    assert watchdog.heartbeats(tmp_path) == {}


def test_a_heartbeat_that_lacks_something_is_not_compared():
    assert "no other process" in watchdog.laggards({0: {"host": "a"}, 1: {"host": "b"}}, 2)


def test_a_pipe_in_place_of_a_heartbeat_does_not_block_the_watchdog(tmp_path):
    (tmp_path / "heartbeats").mkdir()
    os.mkfifo(tmp_path / "heartbeats" / "process-0")
    dog = Watchdog(tmp_path, ResilienceConfig())
    in_time(dog._beat_once)
