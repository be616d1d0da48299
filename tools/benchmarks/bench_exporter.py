"""Measure what it costs a run to be scraped by Prometheus, side by side in one process.

    python tools/benchmarks/bench_exporter.py

Runs of the same config take turns: without the exporter, and with it, scraped by another process as often as --every
says. Prints the ratios of their step times and of the process's processor time, how long a scrape takes, and how much
processor time it and a step cost: on a machine that others use too, processor time is the steadier measure.
"""

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

import jaxtrain as jt
from jaxtrain.observe.ledger import Ledger
from jaxtrain.observe.prometheus.run_metrics import RunMetrics

SCRAPER = """
import sys, time, urllib.request
while True:
    began = time.perf_counter()
    try:
        size = len(urllib.request.urlopen(sys.argv[1], timeout=10).read())
        print(time.perf_counter() - began, size, flush=True)
    except OSError:
        pass
    time.sleep(float(sys.argv[2]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="configs/gpt.py:tiny")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between scrapes")
    parser.add_argument("--port", type=int, default=9415)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the config")
    flags = parser.parse_args()
    jt.enable_compilation_cache()
    folder = Path(tempfile.mkdtemp(prefix="exporter-"))
    log = open(folder / "scrapes", "w+")  # noqa: SIM115
    scraper = subprocess.Popen([sys.executable, "-c", SCRAPER, f"http://127.0.0.1:{flags.port}/metrics",
                                f"{flags.every}"], stdout=log)
    ratios, spent, steps = [], [], []
    try:
        for turn in range(flags.rounds):
            means, processor = {}, {}
            for port in (0, flags.port) if turn % 2 == 0 else (flags.port, 0):
                keys = {"train.steps": flags.steps, "train.eval_every": 0, "train.eval_batches": 1,
                        "checkpoint.every": 0, "train.sample_tokens": 0, "train.progress": False,
                        "observe.prometheus_port": port, **dict(word.split("=", 1) for word in flags.set)}
                began = time.process_time()
                workdir = folder / f"{turn}-{port}"
                jt.train(jt.load_config(flags.config, keys), workdir)
                processor[port] = time.process_time() - began
                lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
                times = [line["step_time_s"] for line in lines if "loss" in line and line["step"] > 5]
                means[port] = statistics.mean(times)
                steps += times
                shutil.rmtree(workdir)
            ratios.append(math.log(means[flags.port] / means[0]))
            spent.append(math.log(processor[flags.port] / processor[0]))
    finally:
        scraper.kill()
    log.seek(0)
    scrapes = [tuple(map(float, line.split())) for line in log.read().splitlines()]
    print(f"{' '.join([flags.config, *flags.set])} on {jax.devices()[0].device_kind}, {flags.rounds} rounds of "
          f"{flags.steps} steps of {1000 * statistics.mean(steps):.1f} ms, scraped every {flags.every:g} s")
    print(f"with the exporter: mean step {of(ratios)}, processor time of the run {of(spent)} of that without")
    print(f"a scrape: median {1000 * statistics.median(took for took, _ in scrapes):.1f} ms, {len(scrapes)} of them, "
          f"{max(size for _, size in scrapes) / 1000:.1f} kB")
    note, answer = noting(folder)
    print(f"processor time: {1e6 * note:.1f} us to note a step and its line, {1000 * answer:.1f} ms for an answer, "
          f"which is {answer / 15:.3%} of one processor with a scrape every 15 s")
    shutil.rmtree(folder)


def of(logs: list[float]) -> str:
    """Return the geometric mean of ratios, with its standard error."""
    return f"{math.exp(statistics.mean(logs)):.4f} +- {statistics.stdev(logs) / math.sqrt(len(logs)):.4f}"


def noting(folder: Path, steps: int = 10_000, answers: int = 100) -> tuple[float, float]:
    """Seconds of a processor that a step costs on the metrics writer's thread, and that an answer costs."""
    metrics = RunMetrics(folder, Ledger(folder, every=0), info={}, constants={})
    line = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, **{f"key{n}": 1.0 for n in range(20)}}
    began = time.process_time()
    for step in range(steps):
        metrics.completed(step)
        metrics.write({"step": step, "tokens": step, **line})
    noted = time.process_time()
    for _ in range(answers):
        metrics.text()
    return (noted - began) / steps, (time.process_time() - noted) / answers


if __name__ == "__main__":
    main()
