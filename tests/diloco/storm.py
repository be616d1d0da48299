"""A storm: a coordinator and islands as processes, which are killed, cut off and restarted while they work.

The coordinator is killed in some of its compactions besides.

    python -m tests.diloco.storm FIRST_SEED LAST_SEED [--fallback]
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from jaxtrain.diloco.coordinator import Coordinator, Policy
from jaxtrain.diloco.network import certificates
from jaxtrain.diloco.outer_log import read_journal
from tests.diloco.network.cutting_proxy import CuttingProxy

ROOT = Path(__file__).parents[2]
FAULTS = "coordinator", "island", "cut"


def started(words, folder, name):
    with (folder / f"{name}.out").open("a") as out:
        return subprocess.Popen([sys.executable, *words], stdout=out, stderr=out, cwd=ROOT,
                                env=os.environ | {"PYTHONPATH": str(ROOT)})


class Storm:
    """Processes by name; `words` are what each is started with."""

    kinds = FAULTS
    pace = 1.0  # times 0.05 to 0.7 seconds pass between faults
    timeouts, lease = (0.1, 0.5, 2), 4

    def __init__(self, folder: Path, seed: int, islands=3, units=20, mode="sync", with_store=False, fallback=False):
        """`with_store`: island 0 meets the others at a store; `fallback`: all have one, and the port is shut."""
        self.folder, self.rng, self.mode = folder, random.Random(seed), mode
        self.islands, self.units, self.fallback = islands, units, fallback
        certificates.make(folder / "keys", range(islands))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.proxy = CuttingProxy(port)
        store = [f"--store={folder / 'store'}", "--store_every=0.05"] if with_store or fallback else []
        timeout = self.rng.choice(self.timeouts)
        self.words = {"coordinator": [
            "-m", "tests.diloco.crashing_coordinator", "serve", f"--workdir={folder / 'log'}",
            f"--address=127.0.0.1:{port}", f"--keys={folder / 'keys'}", f"--islands={islands}",
            f"--timeout={timeout}", f"--lease={self.lease}", f"--mode={'async' if mode == 'async' else 'sync'}",
            "--oldest=6", *store]}
        for index in range(islands):
            at_store = str(folder / "store") if with_store and not index else None
            self.words[f"island {index}"] = self.island(index, at_store, mode)
        self.processes, self.faults = {}, Counter()

    def island(self, index, store, mode):
        settings = {"index": index, "units": self.units, "workdir": str(self.folder), "mode": mode, "store": store,
                    "keys": str(self.folder / "keys"), "address": f"127.0.0.1:{self.proxy.port}",
                    "fallback": self.fallback and str(self.folder / "store")}
        return ["-m", "tests.diloco.adding_island", json.dumps(settings)]

    def run(self, faults: int, patience=240.0):
        end = time.monotonic() + patience
        try:
            with self.proxy:
                for name in self.words:
                    self.start(name)
                for number in range(faults):
                    time.sleep(self.rng.uniform(0.05, 0.7) * self.pace)
                    first = self.fallback and not number
                    self.fault("port" if first else self.rng.choice((*self.kinds, *["port"] * bool(self.fallback))))
                while running := self.running():
                    assert time.monotonic() < end, f"{running} are not done after {patience:.0f} s"
                    time.sleep(0.05)
        finally:
            for process in self.processes.values():
                process.kill()
                process.wait()

    def running(self):
        if self.processes["coordinator"].poll() == -signal.SIGKILL:
            self.faults["compaction"] += 1
            self.start("coordinator")
        ended = {name: process.poll() for name, process in self.processes.items()}
        assert all(status in (None, 0) for status in ended.values()), (ended, self.said())
        assert ended["coordinator"] is None
        return [name for name, status in ended.items() if status is None and name != "coordinator"]

    def said(self):
        return {path.name: path.read_text()[-2000:] for path in self.folder.glob("*.out")}

    def start(self, name):
        self.processes[name] = started(self.words[name], self.folder, name)

    def fault(self, kind):
        if kind == "port":  # for good, or until it is drawn again
            self.proxy.close_port(not self.proxy.closed)
            self.faults["port shut" if self.proxy.closed else "port opened"] += 1
            return
        if kind == "cut":
            self.proxy.cut()
            self.faults[kind] += 1
            return
        names = ["coordinator"] if kind == "coordinator" else self.running()
        if names:
            name = self.rng.choice(names)
            self.processes[name].send_signal(signal.SIGKILL)
            self.processes[name].wait()
            self.faults[kind] += 1
            time.sleep(self.rng.choice([0, 0, 0.3]))
            self.start(name)

    def check(self):
        """Every unit is in the log once, and all islands had the same state after each entry."""
        records, _ = read_journal(self.folder / "log" / "journal.jsonl")
        log = Coordinator(Policy(), records)
        names = [(offer.island, offer.base) for entry in log.entries for offer in entry.contributions]
        assert len(names) == len(set(names)) and log.begins > 0, "there is no name twice, and older ones are gone"
        assert [log.counts[island, "entries"] for island in range(self.islands)] == [self.units] * self.islands
        expected = [[island, unit] for island in range(self.islands) for unit in range(self.units)]
        position, tally = max(json.loads((self.folder / f"{island}.json").read_text())[::2]
                              for island in range(self.islands))
        assert position == log.position and sorted(tally) == expected, "nothing is lost, nothing applied twice"
        states: dict[str, set[str]] = {}
        for island in range(self.islands):
            for line in (self.folder / f"{island}.log").read_text().splitlines():
                number, _, state = line.partition(" ")
                states.setdefault(number, set()).add(state)
        assert all(len(found) == 1 for found in states.values())
        return log.position


def storm(folder: Path, seed: int, faults=10, fallback=False) -> Storm:
    made = Storm(folder, seed, mode="async" if seed % 3 == 2 else "sync", with_store=seed % 2 == 1 and not fallback,
                 fallback=fallback)
    made.run(faults)
    made.check()
    return made


if __name__ == "__main__":
    for number in range(int(sys.argv[1]), int(sys.argv[2]) + 1):
        with tempfile.TemporaryDirectory() as place:
            begun = time.monotonic()
            done = storm(Path(place), number, fallback="--fallback" in sys.argv)
            print(f"seed {number}: {done.check()} entries, {dict(done.faults)}, {time.monotonic() - begun:.1f} s",
                  flush=True)
