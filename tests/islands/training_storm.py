"""Storms over islands that train: killed, told to stop, cut off and restarted, they end where calm ones do.

    python -m tests.islands.training_storm FIRST_SEED LAST_SEED [MODE]

The first run is calm, and its loss is what those of the storms are compared with.
"""

import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from jaxtrain.distributed import exit_codes
from jaxtrain.islands.coordinator import Coordinator, Policy
from jaxtrain.islands.outer_log import read_journal
from tests.islands.storm import FAULTS, ROOT, Storm

STEPS, EVERY, ROWS = 120, 10, 4


class TrainingStorm(Storm):
    """Islands that are runs of the tiny GPT, and have five minutes to come back before a round goes on without them."""

    kinds, pace, timeouts, lease = (*FAULTS, "stop"), 20.0, (300,), 300

    def fault(self, kind):
        """As in every storm; `stop`: an island is told to, half of the time with the coordinator out of reach."""
        if kind != "stop":
            return super().fault(kind)
        names = [self.rng.choice(running)] if (running := self.running()) else []
        if names and self.rng.random() < 0.5:
            names.append("coordinator")
            self.processes["coordinator"].kill()
            self.processes["coordinator"].wait()
            time.sleep(self.rng.uniform(0, 5))  # the island may reach its exchange meanwhile
        for name in names[:1]:
            self.processes[name].send_signal(signal.SIGTERM)
            status = self.processes[name].wait(60)
            assert status in (0, exit_codes.SAVED, -signal.SIGTERM), status  # done already; in time; while it starts
            self.faults["stop" if status == exit_codes.SAVED else "stop too early or late"] += 1
        for name in names:
            self.start(name)

    def island(self, index, store, mode):
        keys = {"train.steps": STEPS, "train.eval_every": STEPS, "train.progress": False, "checkpoint.every": EVERY,
                "data.global_batch_size": ROWS, "optimizer.warmup_steps": 5, "islands.count": self.islands,
                "islands.index": index, "islands.every": EVERY, "islands.mode": mode, "islands.snapshot_every": 5,
                "islands.meeting": store or f"tcp://127.0.0.1:{self.proxy.port}",
                **({} if store else {"islands.keys": self.folder / "keys"})}
        return ["-m", "jaxtrain.main", f"--config={ROOT / 'configs/gpt.py'}:tiny",
                f"--workdir={self.folder / f'run{index}'}", *(f"--config.{key}={value}" for key, value in keys.items())]

    def check(self):
        """Return the loss of each island and how many entries there are; every step was contributed once."""
        records, _ = read_journal(self.folder / "log" / "journal.jsonl")
        log = Coordinator(Policy(), records)
        names = [(offer.island, offer.base) for entry in log.entries for offer in entry.contributions]
        assert len(names) == len(set(names)) and log.begins > 0
        losses = []
        for index in range(self.islands):
            lines = (self.folder / f"run{index}" / "metrics.jsonl").read_text().splitlines()
            losses.append([line["eval_loss"] for line in map(json.loads, lines) if "eval_loss" in line][-1])
            assert log.counts[index, "steps"] >= STEPS
        return losses, log.position


def storm(folder: Path, seed: int, faults: int, mode="sync", with_store=False) -> TrainingStorm:
    made = TrainingStorm(folder, seed, islands=2, mode=mode, with_store=with_store)
    made.run(faults, patience=1200)
    return made


if __name__ == "__main__":
    calm = 0.0
    for number in [-1, *range(int(sys.argv[1]), int(sys.argv[2]) + 1)]:
        with tempfile.TemporaryDirectory() as place:
            began = time.monotonic()
            done = storm(Path(place), number, 0 if number < 0 else 6, *sys.argv[3:])
            (found, entries), calm = done.check(), calm or max(done.check()[0])
            away = max(abs(one / calm - 1) for one in found)
            name = "calm" if number < 0 else f"seed {number}"
            print(f"{name}: loss {found}, {away:.2%} from calm, {entries} entries, "
                  f"{dict(done.faults)}, {time.monotonic() - began:.0f} s", flush=True)
            assert away < 0.01
