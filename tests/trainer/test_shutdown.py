"""Signals: each ends a run in order, whenever it comes, and none is lost or leaves anything behind."""

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.distributed import exit_codes
from jaxtrain.main import main
from jaxtrain.trainer.shutdown import Interrupt, before_the_loop
from tests.tiny import slow_process, tiny_flags, wait_for_lines

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("cache", "on_two", "built_once")  # programs are traced and compiled once
TINY = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.eval_batches=1",
        "data.global_batch_size=8", "train.steps=12", "train.eval_every=3", "checkpoint.every=3",
        "resilience.check_every=0"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return tiny_flags(tmp_path_factory, TINY)


@pytest.mark.slow
def test_second_interrupt_ends_at_once(flags, tmp_path):
    with slow_process(flags, tmp_path, seconds=10) as started:
        wait_for_lines(tmp_path, 1, started)
        started.send_signal(signal.SIGINT)
        while "stopping after this step" not in (line := started.stderr.readline()):
            assert line, "it ended without a word of the first one"
        started.send_signal(signal.SIGINT)
        _, err = started.communicate(timeout=60)
    assert started.returncode == 130 and err.endswith("stopped at once; what was saved before is kept\n")
    assert "Traceback" not in err and CheckpointManager(tmp_path / "checkpoints").latest() is None


@pytest.fixture
def uncollected():
    """Collection is off, since what a handler raises would be lost in a callback of the collector, as JAX has one."""
    gc.disable()
    yield
    gc.enable()


def test_interrupt_leaves_handlers_as_they_were(uncollected):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interrupt() as interrupt:
        assert not interrupt.requested(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.requested(2) and interrupt.signal == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)  # impatient launchers send it twice
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("number, raised", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_an_early_signal_is_not_lost_with_what_it_raised(number, raised):
    with before_the_loop():
        with contextlib.suppress(raised):
            os.kill(os.getpid(), number)
        with pytest.raises(raised), Interrupt():
            pytest.fail("the loop began")
    with Interrupt():
        pass


@pytest.mark.parametrize("number, raised", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_an_early_signal_is_not_lost_in_an_error_that_it_becomes(number, raised, uncollected):
    with pytest.raises(raised), before_the_loop():
        try:
            os.kill(os.getpid(), number)
        except BaseException as stopped:
            raise ImportError("an error in initializing the extension") from stopped
    with pytest.raises(ImportError), before_the_loop():
        raise ImportError("of another cause")


def test_interrupt_on_another_thread():
    """A notebook's or a server's thread gets no signals; training works all the same."""
    seen = []

    def work():
        with Interrupt() as interrupt:
            seen.append(interrupt.requested(1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


@pytest.mark.exhaustive  # one during an import ends alike
def test_sigterm_before_the_loop(flags, tmp_path):
    """Nothing is there to save, and launchers are told to start it again all the same."""
    waiting = """
import importlib, pathlib, sys, time
from jaxtrain.main import main

def build(config, **parts):
    pathlib.Path(sys.argv[-1].partition("=")[2], "here").touch()
    time.sleep(100)

importlib.import_module("jaxtrain.trainer.loop").build = build
sys.exit(main())
"""
    started = subprocess.Popen([sys.executable, "-c", waiting, *flags, f"--workdir={tmp_path}"], text=True,
                               env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE)
    try:
        end = time.monotonic() + 90
        while not (tmp_path / "here").exists() and time.monotonic() < end and started.poll() is None:
            time.sleep(0.02)
        started.send_signal(signal.SIGTERM)
        err = started.communicate(timeout=60)[1]
    finally:
        started.kill()
    assert started.returncode == exit_codes.SAVED
    assert err == "stopped outside of the loop; run the same command again to resume\n"


INSIDE = {  # a module that is about to be imported, as part of what
    "json": "jaxtrain.main", "jaxtrain.commands.flags": "jaxtrain.main", "jaxtrain.trainer.shutdown": "jaxtrain.main",
    "numpy._core._multiarray_umath": "jaxlib, which is not written in Python", "contextvars": "numpy, likewise",
    "jax._src.xla_bridge": "jax", "tensorstore._tensorstore": "tensorstore", "flax.nnx": "flax", "optax": "the loop",
    "grain": "the loop", "jaxtrain.trainer.session": "the loop", "jaxtrain.run": "the loop",
}


@pytest.mark.parametrize("module", [
    name if name == "numpy._core._multiarray_umath" else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in INSIDE])
def test_ten_sigterms_during_an_import_end_with_75(tmp_path, module):
    """It does not die by the signal: an exception in an import may crash a module that is not written in Python."""
    code = f"""
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.write(1, b"here")
            for _ in range(10):
                signal.raise_signal(signal.SIGTERM)

for name in ("json", "contextvars"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Finder())
runpy.run_module("jaxtrain.main", run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", code, f"--config={ROOT}/configs/gpt.py:tiny",
                            f"--config.data.source={__file__}", f"--workdir={tmp_path}"],
                           env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "here", ended.stderr
    assert ended.returncode == exit_codes.SAVED, ended.stderr
    # Tensorstore is imported after the first step, where the loop ends at its next one.
    where = "saved at step 1" if module.startswith("tensorstore") else "stopped outside of the loop"
    assert ended.stderr.count(f"{where}; run the same command again to resume\n") == 1
    assert "Traceback" not in ended.stderr


def test_a_signal_waits_for_the_end_of_an_import(tmp_path, monkeypatch, uncollected):
    (tmp_path / "held_module.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nos.kill(os.getpid(), signal.SIGTERM)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as ended, before_the_loop():
        held = importlib.import_module("held_module")
        threading.Event().wait(60)
        pytest.fail("the signal is lost")
    assert ended.value.code == exit_codes.SAVED and held.whole


def test_a_signal_whose_exception_python_discards_is_sent_again(capfd):
    """JAX's callback of the garbage collector discards exceptions, for example."""
    def callback(*_):
        gc.callbacks.remove(callback)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended, before_the_loop():
        gc.callbacks.append(callback)
        gc.collect()
        threading.Event().wait(60)
        pytest.fail("the signal is lost")
    assert ended.value.code == exit_codes.SAVED
    assert capfd.readouterr().err == "stopped outside of the loop; run the same command again to resume\n"


def test_a_second_interrupt_whose_exception_python_discards_is_sent_again(uncollected):
    def callback(*_):
        gc.callbacks.remove(callback)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), before_the_loop(), Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested(1)
        gc.callbacks.append(callback)
        gc.collect()
        threading.Event().wait(60)
        pytest.fail("the signal is lost")
    with before_the_loop(), Interrupt() as interrupt:  # a later run in this process is not ended by it
        assert not interrupt.requested(1)


def test_a_held_signal_is_forgotten_with_what_it_was_to_end(tmp_path, monkeypatch):
    """The signal is looked at again after the import, but not when the run has ended."""
    (tmp_path / "signals_itself.py").write_text("""
import os, signal, threading
for _ in range(2):
    os.kill(os.getpid(), signal.SIGTERM)
timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
""")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.import_module("jaxtrain.trainer.shutdown"), "_AGAIN_S", 60.0)
    with before_the_loop():
        timer, = importlib.import_module("signals_itself").timers
    cancelled = timer.finished.is_set()
    timer.cancel()
    assert cancelled


@pytest.mark.slow
def test_sigterm_behind_the_last_step_changes_nothing(flags, tmp_path, monkeypatch):
    """There is nothing to start again, as when a supervisor has just decided to start with more processes."""
    sample = importlib.import_module("jaxtrain.hub.generate")
    monkeypatch.setattr(sample, "sample", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM) or "")
    assert main([*flags, "--config.train.sample_tokens=1", f"--workdir={tmp_path / 'work'}"]) == 0


def test_sigterm_at_exit_changes_nothing():
    code = ("import atexit, os, runpy, signal, sys; atexit.register(os.kill, os.getpid(), signal.SIGTERM); "
            "runpy.run_module('jaxtrain.main', run_name='__main__')")
    ended = subprocess.run([sys.executable, "-c", code, f"--config={ROOT}/configs/gpt.py:tiny", "--print_config"],
                           env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
