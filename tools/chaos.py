"""python tools/chaos.py --storms=100: real multi-process training under seeded storms, compared with a calm run.

Each storm trains under `jaxtrain.supervise` with 2 to 4 processes and does to it what its seed says: FAULTS below.
In the end the parameters, every loss and every token count must be those of the calm run, to the bit (within 1e-6
where the mesh changed meanwhile), and the ledger must add up to the wall time. Prints a line a storm, and a table:
seconds to recover and steps lost by fault.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEVICES = {2: 2, 3: 1, 4: 1}  # of each of so many processes: all of them share two cores
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
# Sums are made in another order on another mesh. With an epsilon of 1e-3 Adam does not make whole steps of differences
# where gradients are nothing but rounding, such as those of the bias of keys.
CHANGED_MESH, EPSILON = {"loss": 1e-6, "grad_norm": 1e-5, "params": 1e-6}, 1e-3
PEER_TIMEOUT = 20  # seconds of silence after which a stopped process is gone; 60 by default
ROWS = 24  # of a batch: over 2, 3 and 4 devices they divide


# ------------------------------------------------------------------------------------------------------------ the run
@dataclass
class Training:
    """One supervised run: its process, and what it shows from outside."""

    workdir: Path
    processes: int
    steps: int
    every: int
    elastic: bool = False  # goes on without the process that died, and takes it back some seconds later
    extra: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    prefix: list[str] = field(default_factory=list)
    space: str = ""  # the network namespace, if it has one of its own
    store: subprocess.Popen | None = None
    supervisor: subprocess.Popen | None = None
    seconds: float = 0.0

    def start(self) -> "Training":
        text = self.workdir.parent / "text.txt"
        if not text.exists():
            text.write_text("".join(f"line {n} of a text that is long enough\n" for n in range(5000)))
        model = {"model.num_layers": 1, "model.embed_dim": 32, "model.max_seq_len": 64, "data.seq_len": 64,
                 "data.global_batch_size": ROWS, "data.source": text, "train.steps": self.steps, "train.eval_every": 0,
                 "train.eval_batches": 1, "train.progress": False, "checkpoint.every": self.every, "checkpoint.keep": 3,
                 "optimizer.zero_stage": 1, "optimizer.eps": EPSILON}
        size = [f"--processes={self.processes}", *([f"--min_processes={self.processes - 1}", "--lost_after=1",
                                                    "--retry_lost=10"] if self.elastic else [])]
        command = [*self.prefix, sys.executable, "-m", "jaxtrain.supervise", *size, "--",
                   f"--config={ROOT}/configs/gpt.py:tiny", *(f"--config.{key}={value}" for key, value in model.items()),
                   *self.extra, f"--workdir={self.workdir}"]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES[self.processes]}",
            "PYTHONPATH": str(ROOT), "JAXTRAIN_PEER_TIMEOUT": str(PEER_TIMEOUT)} | self.environment
        self.log = open(self.workdir.parent / f"{self.workdir.name}.log", "ab")  # noqa: SIM115 (closed by end)
        self.began = time.time()
        self.supervisor = subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log,
                                           start_new_session=True)
        return self

    def running(self) -> bool:
        return self.supervisor is not None and self.supervisor.poll() is None

    def pids(self) -> list[int]:
        """Of the training processes that live now, by process number."""
        found = {}
        for folder in Path("/proc").iterdir():
            try:
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if f"--workdir={self.workdir}" in words and "jaxtrain.main" in words:
                    number = [word.partition("=")[2] for word in words if word.startswith("--process_id=")]
                    found[int(number[0]) if number else 0] = int(folder.name)  # who is alone has no number
            except OSError:
                continue
        return [found[number] for number in sorted(found)]

    def lines(self) -> list[dict]:
        try:
            text = (self.workdir / "metrics.jsonl").read_text()
        except OSError:
            return []
        found = []
        for line in text.splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return [line for line in found if "loss" in line]

    def step(self) -> int:
        lines = self.lines()
        return lines[-1]["step"] if lines else 0

    def wait(self, condition: Callable[[], bool], limit: float, every: float = 0.02) -> bool:
        """Whether it came true while the run went on."""
        until = time.monotonic() + limit
        while time.monotonic() < until and self.running():
            if condition():
                return True
            time.sleep(every)
        return condition()

    def end(self, limit: float) -> int | None:
        assert self.supervisor
        try:
            return self.supervisor.wait(limit)
        except subprocess.TimeoutExpired:
            send(signal.SIGUSR1, *self.pids())  # where they hang, for their logs
            time.sleep(1)
            return None
        finally:
            self.seconds = time.time() - self.began
            if self.supervisor.poll() is None:
                os.killpg(self.supervisor.pid, signal.SIGKILL)
                self.supervisor.wait()
            send(signal.SIGKILL, *self.pids())
            self.log.close()

    def attempts(self) -> int:
        """How often the processes were started."""
        logs = self.workdir / "logs"
        return sum(entry.name.isdecimal() for entry in logs.iterdir()) if logs.is_dir() else 0

    def checkpoints(self, pattern: str = "*") -> list[Path]:
        folder = self.workdir / "checkpoints"
        found = [path for path in folder.glob(pattern) if path.name.isdecimal()] if folder.is_dir() else []
        return sorted(found, key=lambda path: int(path.name))

    def resumed(self) -> int | None:
        """At which step the newest start began, once it says so."""
        try:
            text = (self.workdir / "logs" / str(self.attempts()) / "process-0.log").read_text()
        except OSError:
            return None
        found = re.findall(r"^resumed from (?:the snapshot of )?step (\d+)", text, re.MULTILINE)
        return int(found[-1]) if found else None

    def trains_again(self) -> bool:
        """Whether the newest start has done a step: it has written to the metrics, behind where it began."""
        began = (self.workdir / "logs" / str(self.attempts())).stat().st_ctime
        metrics = self.workdir / "metrics.jsonl"
        return metrics.exists() and metrics.stat().st_mtime > began and self.step() > (self.resumed() or 0)

    @property
    def clock(self) -> Path:
        return self.workdir.parent / "clock"

    def clean(self) -> None:
        """What faults needed goes; the files stay."""
        if os.path.ismount(self.workdir):
            try:
                shutil.copytree(self.workdir, self.workdir.with_name("kept"), symlinks=True, dirs_exist_ok=True)
            finally:
                subprocess.run(["umount", "-l", str(self.workdir)], check=True)
        if self.space:
            subprocess.run(["ip", "netns", "del", self.space], check=True)


# --------------------------------------------------------------------------------------------------------- the faults
@dataclass
class Fault:
    """What was done, when, and what it cost."""

    kind: str
    at_step: int
    seconds: float | None = None  # until all trained again; None: nothing had to start again
    steps_lost: int = 0
    note: str = ""


def send(number: signal.Signals, *pids: int) -> None:
    """Who has just ended by itself needs none."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


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
    """What the processes say to one another crawls for some seconds."""
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


# --------------------------------------------------------------------------------------------------------- the storms
@dataclass
class Storm:
    """One run, what was done to it, and what is wrong with what came out."""

    seed: int
    processes: int
    faults: list[Fault]
    seconds: float
    wrong: list[str]
    goodput: float | None

    def __str__(self) -> str:
        told = [f"{fault.kind} at step {fault.at_step}" + (f" ({fault.note})" if fault.note else "") + (
            f": {fault.seconds:.1f} s, {fault.steps_lost} steps lost" if fault.seconds is not None else "")
            for fault in self.faults]
        return (f"storm {self.seed}: {'WRONG' if self.wrong else 'right'}, {self.processes} processes, "
                f"{self.seconds:.0f} s, goodput {self.goodput or 0:.0%}; " + "; ".join([*told, *self.wrong]))


class Chaos:
    """The calm runs that storms are compared with, and what they need."""

    def __init__(self, folder: Path, steps: int, every: int, kinds: list[str], limit: float):
        self.folder, self.steps, self.every, self.kinds, self.limit = folder, steps, every, kinds, limit
        self.calm: dict[int, Training] = {}
        self.store: subprocess.Popen | None = None
        if "store_down" in kinds:
            self.port = _free_port()
            command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
            self.store = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def run(self, name: str, processes: int, kinds: list[str]) -> Training:
        """A run, started, with what the faults to come need."""
        (folder := self.folder / name).mkdir(parents=True)
        run = Training(folder / "run", processes, self.steps, self.every, elastic="lose_one" in kinds)
        if "full_disk" in kinds:
            run.workdir.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(run.workdir)], check=True)
        if "slow_network" in kinds:
            run.space = f"jaxtrain{os.getpid()}"
            subprocess.run(["ip", "netns", "add", run.space], check=True)
            subprocess.run(["ip", "-n", run.space, "link", "set", "lo", "up"], check=True)
            run.prefix = ["ip", "netns", "exec", run.space]
        if "clock_jump" in kinds:
            run.clock.write_text("+0\n")
            run.environment |= {"LD_PRELOAD": FAKETIME, "FAKETIME_TIMESTAMP_FILE": str(run.clock),
                                "FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        if "store_down" in kinds:
            import boto3

            run.store = self.store
            run.environment |= {
                "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "NO_PROXY": "127.0.0.1"}
            boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.port}", aws_access_key_id="testing",
                         aws_secret_access_key="testing", region_name="us-east-1").create_bucket(Bucket=f"b{name}")
            run.extra.append(f"--config.checkpoint.mirror=s3://b{name}/run")
        return run.start()

    def calm_run(self, processes: int) -> Training:
        if processes not in self.calm:
            run = self.run(f"calm-{processes}", processes, [])
            status = run.end(self.limit)
            if status != 0:
                raise SystemExit(f"the calm run of {processes} processes ended with {status}; see {run.log.name}")
            self.calm[processes] = run
        return self.calm[processes]

    def storm(self, seed: int) -> Storm:
        rng = random.Random(seed)
        processes = rng.choice((2, 2, 3, 4))
        kinds = [rng.choice(self.kinds) for _ in range(rng.randint(1, 3))]
        if {"slow_network", "store_down"} <= set(kinds):
            kinds = [kind for kind in kinds if kind != "slow_network"]  # the store is not in the run's network
        calm = self.calm_run(processes)
        run, faults = self.run(f"storm-{seed}", processes, kinds), []
        try:
            last = 0
            for i, kind in enumerate(kinds):
                to = last + rng.randint(1, max(1, (self.steps - last) // (len(kinds) - i + 1)))
                if not run.wait(lambda to=to: run.step() >= to, self.limit) or run.step() >= self.steps - 1:
                    break
                try:
                    faults.append(inflict(run, kind, rng))
                except TooLate:
                    break
                last = run.step()
            status = run.end(self.limit)
            wrong = [] if status == 0 else [f"exit status {status}"]
            wrong += differences(run, calm) if status == 0 else []
            ledger, goodput = booked(run)
            least, most = (moment - first_start(run) for moment in (last_written(run), run.began + run.seconds))
            if not least - 3.0 < ledger < most + 3.0 and "clock_jump" not in kinds:
                wrong.append(f"the ledger has {ledger:.1f} of {least:.1f} to {most:.1f} s")
            return Storm(seed, processes, faults, run.seconds, wrong, goodput)
        finally:
            run.clean()


def differences(run: Training, calm: Training) -> list[str]:
    """In what a storm's run is not the calm one's."""
    wrong = []
    near = CHANGED_MESH if run.elastic else dict.fromkeys(CHANGED_MESH, 0.0)
    ours, theirs = (one.lines() for one in (run, calm))
    if [line["step"] for line in ours] != [line["step"] for line in theirs]:
        wrong.append(f"the metrics have {len(ours)} and {len(theirs)} lines")
    for a, b in zip(ours, theirs, strict=False):
        apart = any(abs(a[key] - b[key]) > near[key] * abs(b[key]) for key in ("loss", "grad_norm"))
        if a["tokens"] != b["tokens"] or apart:
            wrong.append(f"the metrics differ from step {a['step']} on: {a['loss']} and {b['loss']}")
            break
    (ours, theirs) = (json.loads((one.checkpoints()[-1] / "good.json").read_text()) for one in (run, calm))
    if ours["step"] != calm.steps:
        wrong.append(f"it ended at step {ours['step']}")
    elif ours["fingerprint"] != theirs["fingerprint"]:
        diff = inspect("diff", run.workdir, calm.steps, calm.workdir, calm.steps).stdout
        found = re.findall(r"^array params/.* by at most (\S+)", diff, re.MULTILINE)
        distance = max(map(float, found), default=0.0)
        if not run.elastic or distance > near["params"]:
            wrong.append(f"the final parameters differ by {distance}")
    problems = inspect("verify", run.workdir, calm.steps)
    if problems.returncode:
        wrong.append(f"the final checkpoint is damaged: {problems.stdout[-200:]}{problems.stderr[-200:]}")
    return wrong


def inspect(*words: object) -> subprocess.CompletedProcess:
    """What `python -m jaxtrain.checkpoint` says."""
    return subprocess.run([sys.executable, "-m", "jaxtrain.checkpoint", *map(str, words)], capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


def first_start(run: Training) -> float:
    """When the supervisor first started processes: its own start is not the run's."""
    from jaxtrain.observe.events import events

    return next((event["time"] for event in events(run.workdir) if event["kind"] == "attempt"), run.began)


def last_written(run: Training) -> float:
    """When training was certainly not over: how long processes take to end behind their ledger is not the run's."""
    written = [run.workdir / "metrics.jsonl", *run.checkpoints()[-1].rglob("*")]
    return max(path.stat().st_mtime for path in written)


def booked(run: Training) -> tuple[float, float | None]:
    """Seconds that the ledger accounts for, and the goodput."""
    from jaxtrain.observe import goodput

    ledger = goodput.account(goodput.incarnations(run.workdir))
    return sum(ledger.seconds.values()), ledger.goodput


def table(storms: list[Storm]) -> Iterator[str]:
    """By kind of fault: how often, how long, how many steps."""
    by_kind = defaultdict(list)
    for storm in storms:
        for fault in storm.faults:
            by_kind[fault.kind].append(fault)
    yield "| fault | times | seconds to recover: median | p95 | steps lost: median | most |"
    yield "|---|---|---|---|---|---|"
    for kind, faults in sorted(by_kind.items()):
        seconds = sorted(fault.seconds for fault in faults if fault.seconds is not None)
        if not seconds:
            yield f"| {kind} | {len(faults)} | no restart | | | |"
            continue
        lost = [fault.steps_lost for fault in faults if fault.seconds is not None]
        p95 = seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))]
        yield (f"| {kind} | {len(faults)} | {statistics.median(seconds):.1f} | {p95:.1f} | "
               f"{statistics.median(lost):.0f} | {max(lost)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--storms", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the first storm; the others follow")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--only", nargs="+", choices=FAULTS, help="these kinds of faults")
    parser.add_argument("--without", nargs="+", choices=FAULTS, default=[], help="not these")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds until a run counts as hung")
    parser.add_argument("--folder", type=Path, help="keep the runs here; default: thrown away")
    flags = parser.parse_args()
    kinds = [kind for kind in flags.only or FAULTS if kind not in flags.without and possible(kind)]
    folder = flags.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    chaos, storms = Chaos(folder, flags.steps, flags.every, kinds, flags.limit), []
    try:
        for seed in range(flags.seed, flags.seed + flags.storms):
            storms.append(storm := chaos.storm(seed))
            print(storm, flush=True)
    finally:
        if chaos.store:
            chaos.store.kill()
        if not flags.folder:
            shutil.rmtree(folder, ignore_errors=True)
    wrong = sum(bool(storm.wrong) for storm in storms)
    print("\n".join(["", *table(storms), "", f"{len(storms) - wrong} of {len(storms)} storms right; goodput: median "
                     f"{statistics.median(storm.goodput or 0 for storm in storms):.0%}"]))
    return int(bool(wrong))


def possible(kind: str) -> bool:
    """Whether this machine lets us do it; says if not."""
    needs = {"full_disk": os.geteuid() == 0, "slow_network": os.geteuid() == 0 and shutil.which("tc") is not None,
             "clock_jump": Path(FAKETIME).exists()}.get(kind, True)
    if not needs:
        print(f"{kind} is not possible here (it needs root, tc, libfaketime)", file=sys.stderr)
    return needs


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
