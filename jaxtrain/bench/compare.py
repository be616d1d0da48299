"""Compare a run with other programs in alternating blocks of steps, so that any disturbance affects all of them."""

import statistics
import time
from typing import Any

import jax
import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.bench.contenders import apart, contenders
from jaxtrain.bench.measurement import Steps, summary, training
from jaxtrain.run import Run

BLOCKS = 20
PAUSE = 0.1  # seconds between blocks, until the threads of the last one stop spinning
HELD = 32  # batches that the other programs keep on the device and cycle through

Block = tuple[float, float]  # milliseconds per step of wall time, and of CPU time of all threads


def compare(run: Run, names: list[str], steps: int, warmup: int) -> JsonObject:
    """Measure milliseconds per step of jaxtrain and each other program, and how much times and losses differ."""
    # On an accelerator a block begins with an idle device that waits for its first step: that must not count for much.
    size = max(1 if jax.default_backend() == "cpu" else 10, steps // BLOCKS)
    blocks = -(-steps // size)
    with training(run, warmup + blocks * size, one_shape=True) as (loop, ready):
        others = contenders(names, run, loop.state.params)
        held = {name: [other.place(run.batch_source[n]) for n in range(min(HELD, warmup + blocks * size))]
                for name, other in others.items()}
        times: dict[str, list[Block]] = {name: [] for name in ("jaxtrain", *names)}
        curves: dict[str, list[float]] = {name: [] for name in times}
        took = []
        for block in range(-1, blocks):  # the first one is the warm-up
            first, count = (0, warmup) if block < 0 else (warmup + block * size, size)
            spent = {}
            order = list(times)
            turn = block % len(order)
            for name in order[turn:] + order[:turn]:  # each program is first equally often
                batches = [] if name == "jaxtrain" else [
                    held[name][n % len(held[name])] for n in range(first, first + count)]
                time.sleep(PAUSE)
                start = _now()
                if name == "jaxtrain":
                    took.append(loop.steps(count))
                    curves[name] += took[-1].losses
                else:
                    curves[name] += others[name].steps(batches)
                spent[name] = _since(start, count)
            if block >= 0:
                for name, one in spent.items():
                    times[name].append(one)
        same = min(warmup + blocks * size, HELD)  # after these the others see batches again
        far = apart({name: curve[:same] for name, curve in curves.items()})
        measured = took[1:]
        together = Steps([second for one in measured for second in one.seconds],
                         [second for one in measured for second in one.waited], [],
                         sum(one.tokens for one in measured))
        return {**ready, **summary(run, together, loop.done), "blocks": blocks, "contenders": {
            name: _row(times["jaxtrain"], theirs, far.get(name)) for name, theirs in times.items()}}


def _row(ours: list[Block], theirs: list[Block], far: float | None) -> JsonObject:
    """Return a contender's medians, and the ratios of jaxtrain's time to its time."""
    row: dict[str, Any] = {"loss_apart": far}
    for index, clock in enumerate(("wall", "cpu")):
        mine, its = (statistics.median(block[index] for block in blocks) for blocks in (ours, theirs))
        row |= {f"{clock}_ms": its, f"{clock}_ratio": mine / its}
        ratios = [a[index] / b[index] for a, b in zip(ours, theirs, strict=True)]
        row |= {f"{clock}_paired": statistics.median(ratios),
                f"{clock}_quartiles": np.quantile(ratios, (0.25, 0.75)).tolist()}
    return row


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(start: tuple[float, float], steps: int) -> Block:
    wall, cpu = (1e3 * (b - a) / steps for a, b in zip(start, _now(), strict=True))
    return wall, cpu
