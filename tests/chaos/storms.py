"""Compare real multi-process training under seeded storms of faults with a calm run.

    python -m tests.chaos.storms --storms=100

Each storm trains under `jaxtrain supervise` with 2 to 4 processes and does to it what its seed says (faults.py).
In the end the parameters, every loss and every token count must be those of the calm run, to the bit (within 1e-6
where the mesh changed meanwhile), and the ledger must add up to the wall time. Prints a line a storm, and a table:
seconds to recover and steps lost by fault.
"""

import argparse
import json
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.faults import FAKETIME, FAULTS, Fault, TooLate, inflict, possible
from tests.chaos.training import ROOT, Training

# Sums are made in another order on another mesh (training.EPSILON).
CHANGED_MESH = {"loss": 1e-6, "grad_norm": 1e-5, "params": 1e-6}
ASTRAY = 3.0  # seconds that a ledger may miss of several starts, or have too many


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
            if "clock_jump" not in kinds:
                wrong += misbooked(run)
            return Storm(seed, processes, faults, run.seconds, wrong, booked(run)[1])
        finally:
            run.clean()


def differences(run: Training, calm: Training) -> list[str]:
    """Return the differences of a storm's run from the calm one."""
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
    """Return the output of `jaxtrain checkpoint`."""
    return subprocess.run([sys.executable, "-m", "jaxtrain", "checkpoint", *map(str, words)], capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


def last_written(run: Training) -> float:
    """Return a time at which training was certainly not over; processes may end some time after their last entry."""
    written = [run.workdir / "metrics.jsonl", *(path / "good.json" for path in run.checkpoints())]
    return max((path.stat().st_mtime for path in written if path.exists()), default=run.began)


def misbooked(run: Training) -> list[str]:
    """Whether the ledger has more or less than the time since its first start."""
    from jaxtrain.observe import goodput

    ledger, began = booked(run)[0], goodput.incarnations(run.workdir)[0].began
    least, most = last_written(run) - began, run.began + run.seconds - began
    fine = least - ASTRAY < ledger < most + ASTRAY
    return [] if fine else [f"the ledger has {ledger:.1f} of {least:.1f} to {most:.1f} s"]


def booked(run: Training) -> tuple[float, float | None]:
    """Seconds that the ledger accounts for, and the goodput."""
    from jaxtrain.observe import goodput

    ledger = goodput.account(goodput.incarnations(run.workdir))
    return sum(ledger.seconds.values()), ledger.goodput


def table(storms: list[Storm]) -> Iterator[str]:
    """Yield a table by kind of fault: how often, how long, how many steps."""
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
