"""A run of some seconds: its flags, and how to watch it from outside."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxtrain.proof.virtual_devices import OLDER_WAY, QUICKLY, virtual_devices  # noqa: F401

ROOT = Path(__file__).parents[1]
# Training that takes its time over each batch, so that something can be done to it in the middle: SLOW % seconds.
SLOW = """
import sys, time
from jaxtrain.main import main
from tests.each_batch import at_each_batch

at_each_batch(lambda step, place: (time.sleep(%s), place())[1])
sys.exit(main())
"""

# Compiler options for two programs that must give the same bits: the older way rounds an operation differently in each.
SAME_BITS = {"xla_cpu_use_fusion_emitters": True} if OLDER_WAY else {}

# The beginning of a program that has two of its devices. To be the same to the bit, programs are compiled where as many
# devices are: by their number XLA divides some sums.
TWO_DEVICES = """
import jax
some = jax.devices()[:2]
jax.devices = lambda *_: some
"""


@contextlib.contextmanager
def devices(count):
    """Runs of this process have so many devices, with which they compile and train in less time than with eight."""
    import jax  # which is to find the settings of tests/conftest.py

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_, some=jax.devices()[:count]: some)
        patch.setattr(jax, "device_count", lambda *_: count)
        yield


def tiny_flags(tmp_path_factory, words, lines=500):
    """Return the flags of the smallest config with these keys set, over a text of so many lines."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("".join(f"line {n} of a text that is long enough\n" for n in range(lines)))
    return [f"--config={ROOT}/configs/gpt.py:tiny", *(f"--config.{word}" for word in [*words, f"data.source={text}"])]


@contextlib.contextmanager
def slow_process(flags, workdir, seconds=0.25):
    """Start training in a process of its own, with two devices and so many seconds for each batch; end it by a kill."""
    command = [sys.executable, "-c", TWO_DEVICES + SLOW % seconds, *flags, f"--workdir={workdir}"]
    started = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def free_address():
    """Return an address at which processes can meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def closed_while_it_drips(connection):
    """Whether the other end closes a connection over which a byte comes now and then, and never a line."""
    connection.settimeout(0.02)
    for _ in range(3000):  # fewer than a greeting may have, for a minute
        try:
            connection.sendall(b"x")
            if not connection.recv(1000):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def wait_for_lines(workdir, count, started, seconds=600):
    """Until metrics.jsonl has so many."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and started.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if (workdir / "metrics.jsonl").read_bytes().count(b"\n") >= count:
                return
        time.sleep(0.02)
    pytest.fail(f"no {count} lines: {started.communicate()[1] if started.poll() is not None else 'too slow'}")


def wait_for_checkpoint(workdir, step, started):
    """Until it is on the disk, however slow that is; the next save of the run waits for it, too."""
    while not (workdir / "checkpoints" / str(step)).exists():
        assert started.poll() is None, started.communicate()[1]
        time.sleep(0.01)
