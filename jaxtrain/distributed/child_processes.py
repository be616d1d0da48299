"""The training processes of one host, managed by their supervisor: start, monitor, signal and kill them."""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxtrain.distributed import exit_codes, heartbeat
from jaxtrain.errors import UserError

_PR_SET_PDEATHSIG = 1


@dataclass(eq=False)
class Child:
    """One training process; `rank` is its number in the run, `slot` its place (and its accelerators) on this host."""

    rank: int
    slot: int
    log: Path
    process: subprocess.Popen
    line: socket.socket
    heard: float = field(default_factory=time.monotonic)  # when it last gave a sign of life
    died: float | None = None
    cut_off: bool = False  # killed by the supervisor, so its exit status says nothing

    @property
    def code(self) -> int | None:
        """The exit status as of the last `look`, or None."""
        return self.process.returncode

    def look(self) -> None:
        """Read its signs of life, and check whether it has ended."""
        if self.died is None and self.process.poll() is not None:
            self.died = time.monotonic()
        with contextlib.suppress(OSError):
            if self.line.recv(4096, socket.MSG_DONTWAIT):
                self.heard = time.monotonic()

    def send(self, number: int) -> None:
        """Send a signal, if the process is still running."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def dump_stacks(self) -> None:
        """Request a dump of its Python stacks, unless the signal would kill the program."""
        if self.died is None and signal.SIGUSR1 in _caught(self.process.pid):
            self.send(signal.SIGUSR1)

    def kill(self) -> None:
        """Kill the process group, and return when the process is gone."""
        self.cut_off = self.cut_off or self.process.poll() is None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.look()

    def words(self) -> str:
        """Return the rank and how the process ended, as text."""
        assert self.code is not None
        return f"process {self.rank} {exit_codes.words(self.code)}"


def start(command: Sequence[str], rank: int, slot: int, log: Path, environment: Mapping[str, str]) -> Child:
    """Start a training process with its output in `log`."""
    ours, theirs = socket.socketpair()
    with theirs, open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, pass_fds=[theirs.fileno()],
            env={**environment, heartbeat.VARIABLE: str(theirs.fileno()), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C in a terminal goes to the supervisor, which forwards it
            preexec_fn=die_with_parent())
    return Child(rank, slot, log, process, ours)


def gpus(environment: Mapping[str, str]) -> list[str]:
    """Return this host's GPUs, as CUDA_VISIBLE_DEVICES names them; none, where JAX is to use CPUs."""
    if environment.get("JAX_PLATFORMS") == "cpu":
        return []
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name]
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return [str(n) for n in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]


def shares(environment: Mapping[str, str], processes: int) -> list[dict[str, str]]:
    """Return the extra environment of each process, which splits this host's accelerators among them."""
    here = gpus(environment) if processes > 1 else []
    if not here:
        return [{} for _ in range(processes)]
    if len(here) % processes:
        raise UserError("--processes", f"{processes} processes cannot share {len(here)} GPUs evenly",
                        f"choose a divisor of {len(here)}")
    each = len(here) // processes
    return [{"CUDA_VISIBLE_DEVICES": ",".join(here[i * each: (i + 1) * each])} for i in range(processes)]


def die_with_parent():
    """Return a `preexec_fn` that makes Linux kill the child when its parent dies, even if the child is stopped.

    On other systems only the lifeline does this.
    """
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()  # looked up here: little is allowed between fork and exec

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died just before
            os._exit(1)

    return before_exec


def _caught(pid: int) -> set[int]:
    """Return the signals that a process handles itself; empty where this cannot be determined."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return set()
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")), 0)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}
