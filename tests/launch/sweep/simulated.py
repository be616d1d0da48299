"""An engine in memory, whose runs write metrics.jsonl as time passes, and sweeps over it."""

import fcntl
import json
from pathlib import Path

from jaxtrain.launch import submission as launch
from jaxtrain.launch.job_record import Job, Status
from jaxtrain.launch.sweep import sweeper as sweeper_module
from jaxtrain.launch.sweep.sweep_file import CONFIG, Sweep, sweep_of
from jaxtrain.launch.sweep.sweeper import Sweeper
from jaxtrain.launch.sweep.trials import read

VALUES = {"model": {"name": "gpt2", "num_layers": 2, "embed_dim": 64, "num_heads": 4, "vocab_size": 320},
          "train": {"steps": 81, "eval_every": 1, "sample_tokens": 0}, "optimizer": {"warmup_steps": 0}}
RATE = "optimizer.learning_rate"


class Killed(BaseException):
    """Raised in place of SIGKILL."""


def loss(rate: float, seed: int, step: int) -> float:
    """Return the loss of a run after a step: the best rate is 0.01, and rates far from it diverge."""
    return abs(rate - 0.01) + 1 / step + 0.001 * seed if rate < 1 else float("nan")


class Machine:
    """Runs by workdir: how far they are, and whether they were told to stop. It outlives sweepers."""

    name = "local"

    def __init__(self, tmp_path: Path, crash: tuple[int, ...] = ()):
        self.root, self.crash, self.locks = tmp_path / "sweep", crash, {}
        self.steps: dict[str, int] = {}
        self.jobs: dict[str, str] = {}  # folder of a job: its state
        self.begun: list[str] = []
        self.most = 0

    def check(self, job: Job) -> None:
        """Anything goes."""

    def render(self, job: Job) -> dict[str, str]:
        return {"job.sh": ""}

    def submit(self, job: Job) -> str:
        assert job.workdir not in self.locks, "two jobs of one workdir"
        self.begun.append(job.workdir.name)
        self.jobs[f"{job.folder}"] = "running"
        (job.workdir / "logs").mkdir(exist_ok=True)
        self.locks[job.workdir] = open(job.workdir / "logs" / "lock", "w")  # noqa: SIM115
        fcntl.flock(self.locks[job.workdir], fcntl.LOCK_EX)
        self.most = max(self.most, len(self.locks))
        return "1"

    def find(self, job: Job) -> str:
        return "1" if f"{job.folder}" in self.jobs else ""

    def status(self, job: Job) -> Status:
        return Status(self.jobs[f"{job.folder}"])

    def cancel(self, job: Job, now: bool) -> None:
        assert not now
        job.pause_file.write_text("cancel")

    def passes(self, steps: int = 1) -> None:
        """All runs go on by some steps."""
        for folder, state in [*self.jobs.items()]:
            if state == "running":
                self._advance(Path(folder), steps)

    def _advance(self, folder: Path, steps: int) -> None:
        workdir = folder.parent.parent
        trial = json.loads((workdir / "trial.json").read_text())
        seed, rate, end = trial["seed"] or 0, trial["keys"][RATE], VALUES["train"]["steps"]
        state = "cancelled" if (folder / "stop").exists() else "failed" if trial["trial"] in self.crash else ""
        with open(workdir / "metrics.jsonl", "a") as file:
            for step in range(self.steps.get(workdir.name, 0) + 1, end + 1 if not state else 0):
                value = loss(rate, seed, step)
                file.write(json.dumps({"step": step, "loss": 0.0, "tokens": 10 * step}) + "\n")
                file.write(json.dumps({"step": step, "eval_loss": value if value == value else None}) + "\n")
                self.steps[workdir.name] = step
                if not (steps := steps - 1):
                    break
        state = state or ("done" if self.steps.get(workdir.name, 0) >= end else "")
        if state:
            self.jobs[f"{folder}"] = state
            self.locks.pop(workdir).close()


def described(machine: Machine, **said) -> Sweep:
    content = {"config": "base", "workdir": f"{machine.root}", "method": "random", "seed": 1,
               "keys": {RATE: {"low": 1e-4, "high": 1.0, "log": True}}, "budget": {"trials": 12}, **said}
    return sweep_of(content, VALUES)


def swept(machine: Machine, monkeypatch, pace: int = 9, on: str = "local", **said) -> list[dict]:
    """Run a sweep to its end, and return the lines of results.jsonl."""
    sweep = described(machine, **said)
    monkeypatch.setattr(sweeper_module, "engine_of", lambda name: machine)
    monkeypatch.setattr(launch, "engine_of", lambda name: machine)
    monkeypatch.setattr(launch.jobs, "provenance", lambda folder: ({}, ""))
    monkeypatch.setattr(sweeper_module.time, "sleep", lambda seconds: machine.passes(pace))
    machine.root.mkdir(exist_ok=True)
    (machine.root / CONFIG).write_text(json.dumps(VALUES))
    made = Sweeper(sweep, machine.root, on, 0.0)
    made.check()
    made.run()
    assert all(trial.ended for trial in read(sweep, machine.root))
    return [json.loads(line) for line in (machine.root / "results.jsonl").read_text().splitlines()]
