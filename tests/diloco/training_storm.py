"""Storms over islands that train: killed, told to stop, cut off and restarted, they end where calm ones do.

    python -m tests.diloco.training_storm FIRST_SEED LAST_SEED [--mode=gossip] [--overlap=4] [--compression=power_sgd]
    python -m tests.diloco.training_storm FIRST_SEED LAST_SEED --fallback=45

The first run is calm, and its losses are what those of the storms are compared with. Rounds repeat to the bit: islands
that come to all of them end with the calm ones' losses exactly, and others within 1 %. Asynchronous islands do not: the
order in which offers arrive differs from run to run, calm or not, and one that is away for long comes back to train
alone. Of them the log is checked, and how far the losses are from the calm run's is only printed.
"""

import argparse
import json
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np

from jaxtrain.builder import build
from jaxtrain.config.load import load_config
from jaxtrain.config.sections.diloco_keys import DilocoConfig
from jaxtrain.diloco.coordinator import Coordinator, Policy
from jaxtrain.diloco.fragments import fragments, shapes
from jaxtrain.diloco.outer_log import read_journal
from jaxtrain.diloco.outer_optimizer import OuterOptimizer
from jaxtrain.diloco.payload import make_payload
from jaxtrain.distributed import exit_codes
from tests.diloco.storm import FAULTS, ROOT, Storm

STEPS, EVERY, ROWS = 120, 10, 4
ISLANDS = {"sync": 2, "async": 2, "gossip": 3}  # two that gossip would be equal: of three, one is alone in each round


class TrainingStorm(Storm):
    """Islands that are runs of the tiny GPT, and have five minutes to come back before a round goes on without them."""

    kinds, pace, timeouts, lease, refused = (*FAULTS, "stop"), 20.0, (300,), 300, 0

    def __init__(self, *given, overlap=0, compression="none", **keys):
        self.overlap, self.compression = overlap, compression
        super().__init__(*given, **keys)

    def fault(self, kind):
        """Inject a fault, as in every storm; `stop`: signal an island, half of the time without a coordinator."""
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
        keys = {"train.steps": STEPS, "train.eval_every": STEPS, "train.progress": False,
                "checkpoint.every": 7 if self.overlap else EVERY,  # before, in and after exchanges
                "data.global_batch_size": ROWS, "optimizer.warmup_steps": 5, "diloco.count": self.islands,
                "diloco.index": index, "diloco.every": EVERY, "diloco.mode": mode, "diloco.snapshot_every": 5,
                "diloco.overlap": self.overlap, "diloco.compression": self.compression,
                "diloco.meeting": store or f"tcp://127.0.0.1:{self.proxy.port}" + (
                    f",{self.folder / 'store'}" if self.fallback else ""),
                **({} if store else {"diloco.keys": self.folder / "keys"})}
        words = ["tests.diloco.falling_back", f"{self.fallback}"] if self.fallback else ["jaxtrain.main"]
        return ["-m", *words, f"--config={ROOT / 'configs/gpt.py'}:tiny",
                f"--workdir={self.folder / f'run{index}'}", *(f"--config.{key}={value}" for key, value in keys.items())]

    def check(self):
        """Return the loss of each island and how many entries there are; the log has every exchange of each once."""
        records, _ = read_journal(self.folder / "log" / "journal.jsonl")
        log = Coordinator(Policy(), records)
        names = [(offer.island, offer.base) for entry in log.entries for offer in entry.contributions + entry.refused]
        assert len(names) == len(set(names)) and log.begins > 0
        self.returns = Counter()
        for path in self.folder.glob("island *.out"):
            text = path.read_text()
            self.returns += Counter({"to the store": text.count("continues at"), "back": text.count("returns to it")})
        losses = []
        for index in range(self.islands):
            lines = (self.folder / f"run{index}" / "metrics.jsonl").read_text().splitlines()
            losses.append([line["eval_loss"] for line in map(json.loads, lines) if "eval_loss" in line][-1])
            entries, steps, refused = (log.counts[index, name] for name in ("entries", "steps", "refused"))
            assert (entries + refused, steps) == (STEPS // EVERY, EVERY * entries), (index, entries, refused, steps)
            self.refused += refused
        if self.mode != "gossip":  # a snapshot of gossip is of one island or another
            self.check_snapshots(log.entries)
        return losses, log.position

    def check_snapshots(self, entries):
        """The newer snapshot is the older one after the entries between, each applied once, to the bit."""
        kept = {"sync": ("params", "momentum"), "async": ("params", "momentum", "arrived")}[self.mode]
        optimizer = OuterOptimizer(DilocoConfig.learning_rate, DilocoConfig.momentum, self.islands,
                                   DilocoConfig.age_decay)
        (first, old), (last, new) = (
            (int(path.name.partition("-")[0]), dict(zip(kept, np.split(np.fromfile(path, "<f4"), len(kept)),
                                                        strict=True)))
            for path in sorted((self.folder / "log" / "snapshots").iterdir())[-2:])
        for entry in entries:
            came = [self.arrived(self.folder / "log" / "contents" / offer.sha256)
                    for offer in entry.contributions] if first < entry.number <= last else []
            if came and self.mode == "sync":
                old |= optimizer.together(old, came, [offer.weight for offer in entry.contributions],
                                          exact=self.compression == "none")
            elif came:
                old |= optimizer.arrived(old, *came, entry.number, entry.number - 1 - entry.contributions[0].base)
        for name in kept:
            np.testing.assert_array_equal(old[name], new[name])


    def arrived(self, path):
        """Return the vector that an offer's content stands for."""
        if self.compression == "none":
            return np.fromfile(path, "<f4")
        if not hasattr(self, "payload"):
            run = build(load_config(f"{ROOT / 'configs/gpt.py'}:tiny"), devices=jax.devices("cpu")[:1])
            section = DilocoConfig(count=self.islands, compression=self.compression)
            (fragment,) = fragments(run.abstract.params, run.layout.axes, 1)
            self.payload = make_payload(section, shapes(fragment, run.abstract.params, run.layout.axes))
        return self.payload.decode(path.read_bytes())


def storm(folder: Path, seed: int, faults: int, mode="sync", with_store=False, **keys) -> TrainingStorm:
    made = TrainingStorm(folder, seed, islands=ISLANDS[mode], mode=mode, with_store=with_store, **keys)
    made.run(faults, patience=1200)
    return made


def main():
    """Run a calm storm and those of the seeds, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int, help="seed")
    parser.add_argument("last", type=int, help="seed")
    parser.add_argument("--mode", choices=ISLANDS, default="sync", help="diloco.mode")
    parser.add_argument("--store", action="store_true", help="island 0 meets the others at a folder")
    parser.add_argument("--fallback", type=float, default=0, metavar="SECONDS",
                        help="islands have a store, too; the port is shut, and given up after so many seconds")
    parser.add_argument("--overlap", type=int, default=0, help="diloco.overlap")
    parser.add_argument("--compression", default="none", help="diloco.compression")
    parser.add_argument("--faults", type=int, default=6, help="of a storm; 0: all are calm")
    args = parser.parse_args()
    calm = None
    for number in [-1, *range(args.first, args.last + 1)]:
        with tempfile.TemporaryDirectory() as place:
            began = time.monotonic()
            done = storm(Path(place), number, 0 if number < 0 else args.faults, args.mode, args.store,
                         overlap=args.overlap, compression=args.compression, fallback=args.fallback)
            losses, entries = done.check()
        calm = calm or (losses, entries)
        away = max(abs(one / other - 1) for one, other in zip(losses, calm[0], strict=True))
        print(f"{'calm' if number < 0 else f'seed {number}'}: loss {losses}, {away:.2%} from calm, {entries} entries, "
              f"{done.refused} refused, {dict(done.faults + done.returns)}, {time.monotonic() - began:.0f} s",
              flush=True)
        if args.mode != "async":
            assert losses == calm[0] if entries == calm[1] else away < 0.01


if __name__ == "__main__":
    main()
