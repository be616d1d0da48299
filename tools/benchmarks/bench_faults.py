"""Measure how long the others live when one process of a run is killed or stopped, with real processes on loopback.

    python tools/benchmarks/bench_faults.py [--processes 2 4] [--devices 1 2] [--repeat 3]
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = ["model.num_layers=1", "model.embed_dim=32", "model.max_seq_len=32", "data.seq_len=32", "train.progress=false",
        "data.global_batch_size=8", "train.steps=1000000", "train.log_every=10", "optimizer.schedule=constant"]


def start(processes: int, devices: int, workdir: Path) -> list[subprocess.Popen]:
    """A run that does not end by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAXTRAIN_PEER_TIMEOUT": "20",
                   "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    return [subprocess.Popen(
        [sys.executable, "-m", "jaxtrain.main", f"--config={ROOT}/configs/gpt.py:tiny", f"--workdir={workdir}",
         *(f"--config.{key}" for key in TINY), f"--coordinator={coordinator}", f"--num_processes={processes}",
         f"--process_id={i}"], env=environment, stderr=open(workdir / f"stderr-{i}", "wb"))
        for i in range(processes)]


def measure(processes: int, devices: int, victim: int, number: signal.Signals) -> tuple[float, list[int], str]:
    """Return seconds from the signal to the last survivor's end, their statuses, what one of them said."""
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder)
        run = start(processes, devices, workdir)
        try:
            lines = workdir / "metrics.jsonl"
            end = time.monotonic() + 300
            while not (lines.exists() and lines.stat().st_size > 1000):
                assert time.monotonic() < end and all(one.poll() is None for one in run), (
                    workdir / "stderr-0").read_text()
                time.sleep(0.1)
            others = [one for i, one in enumerate(run) if i != victim]
            begun = time.monotonic()
            run[victim].send_signal(number)
            statuses = [one.wait(timeout=200) for one in others]
            seconds = time.monotonic() - begun
            said = [line for i in range(processes) if i != victim
                    for line in (workdir / f"stderr-{i}").read_text().splitlines() if "ends, to be" in line]
            return seconds, statuses, (said or ["nothing"])[0]
        finally:
            for one in run:
                one.kill()
                one.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--signals", nargs="+", default=["SIGKILL", "SIGSTOP"])
    flags = parser.parse_args()
    print("| signal | victim | processes x devices | seconds | statuses of the others | said |\n" + "|---" * 6 + "|")
    for name in flags.signals:
        for processes in flags.processes:
            for devices in flags.devices:
                for victim in (0, processes - 1):
                    for _ in range(flags.repeat):
                        seconds, statuses, said = measure(processes, devices, victim, signal.Signals[name])
                        print(f"| {name} | {victim} | {processes} x {devices} | {seconds:.2f} | {statuses} | {said} |",
                              flush=True)


if __name__ == "__main__":
    main()
