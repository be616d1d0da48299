"""One supervised run of real training under storms.py: how it is started, and what it shows from outside."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEVICES = {2: 2, 3: 1, 4: 1}  # of each of so many processes: all of them share two cores
# With it Adam does not make whole steps of differences where gradients are nothing but rounding, such as those of the
# bias of keys.
EPSILON = 1e-3
PEER_TIMEOUT = 20  # seconds of silence after which a stopped process is gone; 60 by default
ROWS = 24  # of a batch: over 2, 3 and 4 devices they divide


@dataclass
class Training:
    """One supervised run: its process, and what it shows from outside."""

    workdir: Path
    processes: int
    steps: int
    every: int
    elastic: bool = False  # goes on without the process that died, and takes it back some seconds later
    extra: list[str] = field(default_factory=list)
    program: list[str] = field(default_factory=list)  # in place of jaxtrain.main
    environment: dict[str, str] = field(default_factory=dict)
    prefix: list[str] = field(default_factory=list)
    space: str = ""  # the network namespace, if it has one of its own
    store: subprocess.Popen | None = None
    supervisor: subprocess.Popen | None = None
    began: float = 0.0
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
        program = ["--program", *self.program] if self.program else []
        command = [*self.prefix, sys.executable, "-m", "jaxtrain", "supervise", *size, *program, "--",
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
        """The ids of the training processes that live now, by process number."""
        found = {}
        for folder in Path("/proc").iterdir():
            try:
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if f"--workdir={self.workdir}" in words and "supervise" not in words:
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
        """The number of times that the processes were started."""
        logs = self.workdir / "logs"
        return sum(entry.name.isdecimal() for entry in logs.iterdir()) if logs.is_dir() else 0

    def checkpoints(self, pattern: str = "*") -> list[Path]:
        folder = self.workdir / "checkpoints"
        found = [path for path in folder.glob(pattern) if path.name.isdecimal()] if folder.is_dir() else []
        return sorted(found, key=lambda path: int(path.name))

    def resumed(self) -> int | None:
        """The step at which the newest start began, once it says so."""
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
        """Remove what faults needed; the files stay."""
        if os.path.ismount(self.workdir):
            try:
                shutil.copytree(self.workdir, self.workdir.with_name("kept"), symlinks=True, dirs_exist_ok=True)
            finally:
                subprocess.run(["umount", "-l", str(self.workdir)], check=True)
        if self.space:
            subprocess.run(["ip", "netns", "del", self.space], check=True)


def send(number: signal.Signals, *pids: int) -> None:
    """Send a signal to processes; those that have just ended by themselves are skipped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
