"""Measure what it costs to be watched, as a share of the step, for each watcher and for all.

    python tools/benchmarks/bench_observe.py

One run takes steps in blocks, and in each round every watcher has a block, in another order each time, as has the run
alone; so they are compared side by side. The processor time of a step is that of this process: what a watcher takes of
it, a busy machine makes no difference to. Another watcher is another line in `WATCHERS`.
"""

import argparse
import contextlib
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax

import jaxtrain as jt
from jaxtrain.observe import Constants, MetricsWriter, Sink
from jaxtrain.observe.ledger import Ledger
from jaxtrain.observe.prometheus.exporter import exporting
from jaxtrain.observe.prometheus.run_metrics import RunMetrics
from jaxtrain.observe.trackers import made
from jaxtrain.observe.trackers.tracker import About
from jaxtrain.observe.trackers.tracking import Tracking
from jaxtrain.run import identity


def tracked(name: str) -> Callable[[jt.Run, Path], list[Sink]]:
    def sinks(run: jt.Run, workdir: Path) -> list[Sink]:
        about = About(f"{workdir.name}-{time.time_ns()}", workdir.name, "bench", workdir, identity.settings(run), {})
        tracking = Tracking(about, [made(name)])
        tracking.start()
        STOP.append(lambda: tracking.finish("finished"))
        return [tracking]
    return sinks


SCRAPER = """import sys, time, urllib.request
while True:
    time.sleep(1)
    try:
        urllib.request.urlopen(sys.argv[1], timeout=10).read()
    except OSError:
        pass
"""


def scraped(run: jt.Run, workdir: Path) -> list[Sink]:
    """The exporter for Prometheus, asked every second by another process."""
    metrics = RunMetrics(workdir, Ledger(workdir), info={}, constants={})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    open_port = contextlib.ExitStack()
    open_port.enter_context(exporting(metrics, workdir, host="127.0.0.1", port=port))
    scraper = subprocess.Popen([sys.executable, "-c", SCRAPER, f"http://127.0.0.1:{port}/metrics"])
    STOP.extend([scraper.kill, open_port.close])
    return [metrics]


STOP: list[Callable[[], None]] = []
WATCHERS: dict[str, Callable[[jt.Run, Path], list[Sink]]] = {  # what gets the lines, made for a run and a folder
    "none": lambda run, workdir: [],
    "tensorboard": tracked("tensorboard"),
    "wandb": tracked("wandb"),
    "mlflow": tracked("mlflow"),
    "trackio": tracked("trackio"),
    "prometheus": scraped,
}


LINES_S = 20.0  # a second


def share(writer: MetricsWriter, step: int, metrics: dict, seconds: float = 30) -> float:
    """The part of one processor that is busy while lines come and nothing else happens, however busy the machine is."""
    time.sleep(20)  # a watcher has what came before, and has rested
    began, spent = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        step += 1
        writer.push(step, metrics)
        time.sleep(1 / LINES_S)
    return (time.process_time() - spent) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="configs/gpt.py:tiny")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the config")
    parser.add_argument("--block", type=float, default=4.0, help="seconds of a block, about")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--watchers", nargs="+", default=[*WATCHERS], help="of these, and of all of them together")
    flags = parser.parse_args()
    run = jt.build(jt.load_config(flags.config, dict(word.split("=", 1) for word in flags.set)))
    state, batches = run.init(), [run.batch(n) for n in range(4)]
    folder = Path(tempfile.mkdtemp(prefix="observe-"))
    names = ["none", *(name for name in flags.watchers if name != "none")]
    arms = {name: [WATCHERS[name]] for name in names} | {"all": [WATCHERS[name] for name in names]}
    writers, done = {}, dict.fromkeys(arms, 0)
    for name, makers in arms.items():
        (workdir := folder / name).mkdir()
        writers[name] = MetricsWriter(workdir, start_step=0, last_step=10**9, constants=Constants(1),
                                      sinks=[sink for make in makers for sink in make(run, workdir)])

    def block(name: str, steps: int) -> tuple[float, float]:
        """Seconds of a step, and of processors' time, over so many with these watchers."""
        nonlocal state
        began, spent = time.perf_counter(), time.process_time()
        for _ in range(steps):
            state, metrics = run.step(state, batches[done[name] % len(batches)])
            done[name] += 1
            writers[name].push(done[name], metrics)
        jax.block_until_ready(state)
        return (time.perf_counter() - began) / steps, (time.process_time() - spent) / steps

    for name in arms:
        block(name, 5)  # compiled, connected
    time.sleep(10)
    steps = max(5, round(flags.block / block("none", 5)[0]))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for turn in range(flags.rounds):
        order = random.Random(turn).sample([*arms], len(arms))
        for name in order:
            times[name].append(block(name, steps))
            time.sleep(1.5)  # what a watcher has left is not the next one's
    none = times["none"]
    wall, cpu = (1000 * statistics.median(found) for found in zip(*none, strict=True))
    print(f"{flags.config} {' '.join(flags.set)} on {jax.devices()[0].device_kind}: {flags.rounds} rounds of {steps} "
          f"steps, every one logged; alone a step takes {wall:.1f} ms, and {cpu:.1f} ms of processors' time")
    for name, found in times.items():
        if name == "none":
            continue
        for which, what in enumerate(("time", "processor time")):
            low, middle, high = statistics.quantiles(
                [one[which] / base[which] for one, base in zip(found, none, strict=True)], n=4)
            print(f"{name:>12}: {middle:.4f} of its {what} (quartiles {low:.4f} and {high:.4f})")
    print("processors' time of this process, of a second in which 20 lines come and nothing is computed:")
    _, metrics = run.step(state, batches[0])
    busy: dict[str, float] = {}
    for name in arms:
        busy[name] = each = share(writers[name], done[name], jax.block_until_ready(metrics))
        print(f"{name:>12}: {each:.2%} of one, {1000 * (each - busy['none']) / LINES_S:.2f} ms a line more than none",
              flush=True)
    for writer in writers.values():
        writer.close()
    for stop in STOP:
        stop()


if __name__ == "__main__":
    sys.exit(main())
