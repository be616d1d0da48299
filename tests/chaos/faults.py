"""Faults that storms.py injects: kills, stops, damage, a full disk, a bad network, clock jumps; and the recovery."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.training import Training, send

FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"


@dataclass
class Fault:
    """A fault: what was done, when, and its cost."""

    kind: str
    at_step: int
    seconds: float | None = None  # until all trained again; None: nothing had to start again
    steps_lost: int = 0
    note: str = ""


class TooLate(Exception):
    """The run ended before the fault could be done to it."""


def alive(run: Training) -> list[int]:
    """The training processes, as soon as there are any."""
    run.wait(lambda: bool(run.pids()), 60)
    if not (pids := run.pids()):
        raise TooLate
    return pids


def victim(run: Training, rng: random.Random) -> tuple[int, str]:
    """One of those that live, and its name."""
    pids = alive(run)
    number = rng.randrange(len(pids))
    return pids[number], f"process {number} of {len(pids)}"


def kill_one(run: Training, rng: random.Random) -> str:
    """kill -9 of a process at any moment."""
    pid, name = victim(run, rng)
    send(signal.SIGKILL, pid)
    return name


def kill_all(run: Training, rng: random.Random) -> str:
    """kill -9 of all processes at once, as when the power fails."""
    pids = alive(run)
    send(signal.SIGKILL, *pids)
    return f"{len(pids)} processes"


def kill_in_save(run: Training, rng: random.Random) -> str:
    """kill -9 while a checkpoint is being written."""
    folder = run.workdir / "checkpoints"
    seen = run.wait(lambda: any(not path.name.isdecimal() and "tmp" in path.name for path in folder.glob("*")),
                    60, every=0.001)
    time.sleep(rng.uniform(0, 0.05))
    return kill_one(run, rng) + ("" if seen else " (no save was seen)")


def kill_in_verification(run: Training, rng: random.Random) -> str:
    """kill -9 between a checkpoint's commit and the end of its verification."""
    before = {path.name for path in run.checkpoints()}
    seen = run.wait(lambda: bool({path.name for path in run.checkpoints()} - before), 60, every=0.001)
    time.sleep(rng.uniform(0, 0.02))
    return kill_one(run, rng) + ("" if seen else " (no commit was seen)")


def kill_in_restore(run: Training, rng: random.Random) -> str:
    """kill -9, and again while the run starts."""
    before = run.attempts()
    note = kill_one(run, rng)
    run.wait(lambda: run.attempts() > before and len(run.pids()) > 0, 60)
    time.sleep(rng.uniform(0.5, 5.0))
    send(signal.SIGKILL, victim(run, rng)[0])
    return f"{note}, and once more as it started"


def lose_one(run: Training, rng: random.Random) -> str:
    """kill -9 of a process that does not come back at once: the others go on without it, on another mesh."""
    return kill_one(run, rng)


def stop_one(run: Training, rng: random.Random) -> str:
    """SIGSTOP of a process: it is there, and does nothing."""
    pid, name = victim(run, rng)
    send(signal.SIGSTOP, pid)
    return name


def stop_briefly(run: Training, rng: random.Random) -> str:
    """SIGSTOP of a process for a moment: nothing has to start again."""
    pid, _ = victim(run, rng)
    send(signal.SIGSTOP, pid)
    time.sleep(rng.uniform(0.5, 2.0))
    send(signal.SIGCONT, pid)
    return ""


def preempt(run: Training, rng: random.Random) -> str:
    """SIGTERM to one process, as from a cluster: all save at one step, and are started again."""
    send(signal.SIGTERM, victim(run, rng)[0])
    return ""


def damage(run: Training, rng: random.Random) -> str:
    """A byte of the newest checkpoint flips, or a file of it is cut or deleted; then kill -9."""
    run.wait(lambda: len([path for path in run.checkpoints() if (path / "good.json").exists()]) > 1, 60)
    send(signal.SIGSTOP, *alive(run))  # nothing may be saved between the damage and the end
    newest = [path for path in run.checkpoints() if (path / "good.json").exists()][-1]
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    file, how = rng.choice(files), rng.choice(("flipped", "cut", "deleted"))
    if how == "flipped":
        content = bytearray(file.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    elif how == "cut":
        os.truncate(file, rng.randrange(file.stat().st_size))
    else:
        file.unlink()
    send(signal.SIGKILL, *run.pids())
    return f"{how}: {file.relative_to(newest.parent)}"


def delete_newest(run: Training, rng: random.Random) -> str:
    """The newest checkpoint is deleted; then kill -9."""
    run.wait(lambda: len([path for path in run.checkpoints() if (path / "good.json").exists()]) > 1, 60)
    send(signal.SIGSTOP, *alive(run))
    newest = run.checkpoints()[-1]
    shutil.rmtree(newest)
    send(signal.SIGKILL, *run.pids())
    return newest.name


def full_disk(run: Training, rng: random.Random) -> str:
    """The disk is full for some seconds."""
    filler = run.workdir / "filler"
    try:
        with open(filler, "wb") as file:
            while True:
                file.write(b"\0" * 2**16)
                file.flush()
    except OSError:
        pass
    time.sleep(rng.uniform(2.0, 6.0))
    filler.unlink()
    return ""


def slow_network(run: Training, rng: random.Random) -> str:
    """Slow down all messages between the processes for some seconds."""
    rate = rng.choice(("2mbit", "10mbit"))
    shape = ["tc", "qdisc", "replace", "dev", "lo", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
    subprocess.run([*run.prefix, *shape], check=True)
    time.sleep(rng.uniform(2.0, 6.0))
    subprocess.run([*run.prefix, "tc", "qdisc", "del", "dev", "lo", "root"], check=True)
    return rate


def store_down(run: Training, rng: random.Random) -> str:
    """The object storage that holds the second copy is gone for some seconds."""
    store: subprocess.Popen = run.store
    os.kill(store.pid, signal.SIGSTOP)
    time.sleep(rng.uniform(2.0, 6.0))
    os.kill(store.pid, signal.SIGCONT)
    return ""


def clock_jump(run: Training, rng: random.Random) -> str:
    """The wall clock of all processes jumps, there and back."""
    seconds = rng.choice((-7200, -60, 60, 7200))
    run.clock.write_text(f"{seconds:+d}\n")
    time.sleep(rng.uniform(2.0, 6.0))
    run.clock.write_text("+0\n")
    return f"{seconds:+d} s"


FAULTS = {f.__name__: f for f in (
    kill_one, kill_all, kill_in_save, kill_in_verification, kill_in_restore, lose_one, stop_one, stop_briefly, preempt,
    damage, delete_newest, full_disk, slow_network, store_down, clock_jump)}
RESTARTS = {"kill_one", "kill_all", "kill_in_save", "kill_in_verification", "kill_in_restore", "lose_one", "stop_one",
            "preempt", "damage", "delete_newest"}  # what cannot pass without a new start


def inflict(run: Training, kind: str, rng: random.Random) -> Fault:
    """Do it, and wait until the run trains again."""
    attempts, began = run.attempts(), time.monotonic()
    note = FAULTS[kind](run, rng)
    struck = began if kind == "kill_in_restore" else time.monotonic()
    fault = Fault(kind, run.step(), note=note)
    if kind not in RESTARTS and not run.wait(lambda: run.attempts() > attempts, 3):
        run.wait(lambda: run.step() > fault.at_step, 120)
        return fault
    run.wait(lambda: run.attempts() > attempts, 120)
    if run.wait(lambda: run.trains_again(), 120):
        fault.seconds = time.monotonic() - struck
        fault.steps_lost = max(0, fault.at_step - (run.resumed() or 0))
    return fault


def possible(kind: str) -> bool:
    """Whether this machine lets us do it; says if not."""
    needs = {"full_disk": os.geteuid() == 0, "slow_network": os.geteuid() == 0 and shutil.which("tc") is not None,
             "clock_jump": Path(FAKETIME).exists()}.get(kind, True)
    if not needs:
        print(f"{kind} is not possible here (it needs root, tc, libfaketime)", file=sys.stderr)
    return needs
