"""Measure what protection costs while nothing goes wrong, side by side in one process.

    python tools/benchmarks/bench_protection.py

Three runs of the same config take turns: with all protection off, with all of it on, and with a save every so many
steps besides. Prints medians of step times and their ratios, by how much steps are longer while a save is written, and
the seconds for which a save holds up the loop against those of a save that waits for the disk.
"""

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import jaxtrain as jt
from jaxtrain.observe.events import events

OFF = {"resilience.hang_factor": 0, "resilience.check_every": 0, "resilience.probe_every": 0, "checkpoint.every": 0}
ON = {"resilience.check_every": 20, "resilience.probe_every": 5, "checkpoint.every": 0}  # more often than by default
ARMS = {"off": OFF, "on": ON, "saving": ON}


def steps(workdir: Path) -> list[dict]:
    """The lines of a run's steps, without its first ones."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line and line["step"] > 5]


def synchronous(config: jt.Config, folder: Path) -> tuple[float, float]:
    """Seconds of a save that waits until all is on disk, without reading back; and of a copy of the state in memory."""
    import orbax.checkpoint as ocp

    state = jax.block_until_ready(jt.build(config).init())
    took, copied = [], []
    for n in range(4):
        began = time.perf_counter()
        copies = [np.array(leaf) for leaf in jax.tree.leaves(state)]
        copied.append(time.perf_counter() - began)
        del copies
        flat = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state))}
        with ocp.StandardCheckpointer() as saver:
            began = time.perf_counter()
            saver.save(folder / str(n), flat)
            saver.wait_until_finished()
            took.append(time.perf_counter() - began)
    return statistics.median(took[1:]), statistics.median(copied[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="configs/gpt.py")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the config")
    parser.add_argument("--every", type=int, default=20, help="steps between saves, in the runs that save")
    flags = parser.parse_args()
    given = dict(word.split("=", 1) for word in flags.set)
    jt.enable_compilation_cache()
    folder = Path(tempfile.mkdtemp(prefix="protection-"))
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    ratios: dict[str, list[float]] = {"on": [], "saving": []}
    blocked, beside = [], []
    for turn in range(flags.rounds):
        medians = {}
        order = list(ARMS) if turn % 2 == 0 else list(reversed(ARMS))
        for arm in order:
            keys = {"train.steps": flags.steps, "train.eval_every": 0, "train.eval_batches": 1,
                    "train.sample_tokens": 0, "train.progress": False, "optimizer.schedule": "constant",
                    "optimizer.warmup_steps": 0, **ARMS[arm], **given}
            if arm == "saving":
                keys["checkpoint.every"] = flags.every
            workdir = folder / f"{turn}-{arm}"
            jt.train(jt.load_config(flags.config, keys), workdir)
            lines = steps(workdir)
            times[arm] += [line["step_time_s"] for line in lines]
            medians[arm] = statistics.median(line["step_time_s"] for line in lines)
            if arm == "saving":
                blocked += [line["checkpoint_blocked_s"] for line in lines if "checkpoint_blocked_s" in line]
                written = {event["step"]: event["written_s"] + event["verified_s"] for event in events(workdir)
                           if event["kind"] == "checkpoint"}
                for line in lines:  # the step after a save, where the copy is paid, is told by blocked seconds
                    since = (line["step"] - 1) % flags.every
                    saved = line["step"] - 1 - since
                    if saved in written and 0 < since * medians[arm] < written[saved]:
                        beside.append(line["step_time_s"] / medians["off" if "off" in medians else arm])
            shutil.rmtree(workdir)
        for arm in ratios:
            ratios[arm].append(medians[arm] / medians["off"])
    config = jt.load_config(flags.config, given)
    wait, copy = synchronous(config, folder)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jt.build(config).abstract))
    shutil.rmtree(folder)
    print(f"{' '.join([flags.config, *flags.set])} on {jax.devices()[0].device_kind}, {flags.rounds} rounds of "
          f"{flags.steps} steps")
    for arm, found in times.items():
        more = f", {_mean(ratios[arm])} of off" if arm in ratios else ""
        print(f"{arm:>7}: median step {1000 * statistics.median(found):.1f} ms{more}")
    if beside:
        print(f"steps while a save is written and read back: {statistics.median(beside):.3f} of a step without")
    held = statistics.median(blocked)
    print(f"a save of {size / 1e6:.0f} MB holds up the loop for {held:.4f} s, {held / wait:.1%} of the {wait:.3f} s of "
          f"one that waits for the disk; to copy the state takes {copy:.4f} s")


def _mean(ratios: list[float]) -> str:
    """Return the geometric mean of ratios of runs side by side, and its standard error."""
    logs = [math.log(ratio) for ratio in ratios]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return f"{math.exp(statistics.mean(logs)):.4f} +- {error:.4f}"


if __name__ == "__main__":
    sys.exit(main())
