"""Train under the supervisor while processes are killed at drawn times, and record when: what a simulation has to meet.

    python -m tests.chaos.kill_trace FOLDER --seed=1 --steps=1500 --mean=45

Steps wait 0.2 s, so that their time depends little on what else the machine does. Leaves FOLDER/run, the workdir, and
FOLDER/kills.json: the times of the kills in seconds since 1970, as they happened.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from tests.chaos.faults import TooLate, alive
from tests.chaos.training import ROOT, Training, send

SECONDS = 0.2  # that a step waits
# The loop as it is, with steps that wait: what is waited in is booked as the step's own time.
WAITING = f"""
import signal, sys, time
from jaxtrain.resilience.watchdog import Watchdog

begin = Watchdog.begin

def waited(self, step):
    begin(self, step)
    time.sleep({SECONDS})

Watchdog.begin = waited
from jaxtrain.main import main
status = main()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.exit(status)
"""


def trace(folder: Path, seed: int, steps: int, mean: float, every: int, snapshots: int, limit: float) -> int | None:
    """Run to the last step, with kills that are about `mean` seconds apart; return the supervisor's exit status."""
    dice, kills = random.Random(seed), []
    folder.mkdir(parents=True)
    (folder / "waiting.py").write_text(WAITING)
    run = Training(folder / "run", 2, steps, every, program=[sys.executable, str(folder / "waiting.py")], extra=[
        f"--config.checkpoint.local_checkpoint_every={snapshots}", "--config.resilience.check_every=0"])
    run.environment["JAXTRAIN_CACHE"] = os.environ.get("JAXTRAIN_CACHE", str(folder.parent / "cache"))
    run.start()
    try:
        while run.running():
            until = time.monotonic() + mean * dice.uniform(0.4, 1.6)
            if run.wait(lambda until=until: time.monotonic() > until, limit) and run.running():
                pids = alive(run)
                number, now = dice.randrange(len(pids)), time.time()
                send(signal.SIGKILL, pids[number])
                kills.append({"time": now, "process": number, "step": run.step()})
                (folder / "kills.json").write_text(json.dumps(kills))
    except TooLate:
        pass
    return run.end(limit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=int, default=40, help="steps between two checkpoints")
    parser.add_argument("--snapshots", type=int, default=0, help="steps between two snapshots in memory; 0: none")
    parser.add_argument("--mean", type=float, default=45.0, help="mean seconds between two kills")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds until the run counts as hung")
    flags = parser.parse_args()
    status = trace(flags.folder, flags.seed, flags.steps, flags.mean, flags.every, flags.snapshots, flags.limit)
    print(f"exit status {status}; {ROOT}")
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
