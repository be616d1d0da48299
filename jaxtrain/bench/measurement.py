"""Measure how fast a config trains on the available devices, with the planner's predictions next to it."""

import contextlib
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain import observe
from jaxtrain.base.annotations import JsonObject
from jaxtrain.distributed import processes
from jaxtrain.errors import UserError, say
from jaxtrain.observe.device_memory import device_memory
from jaxtrain.plan import targets
from jaxtrain.plan.compiler import memory_of
from jaxtrain.plan.estimate import Estimate, estimate
from jaxtrain.profiling.accounting import profile
from jaxtrain.run import Run, compiled_step, shapes_of
from jaxtrain.train_step.state import TrainState
from jaxtrain.trainer import extended
from jaxtrain.trainer.reporting import constants

TRACED = 3  # steps of a profile


@dataclass
class Steps:
    """The times, losses and tokens of some consecutive steps, by the host's clock."""

    seconds: list[float]  # from the completion of the step before; of the first one, from the start
    waited: list[float]  # for the batch of each step
    losses: list[float]  # only in process 0, which writes them
    tokens: int


class Training:
    """The training loop without checkpoints, evaluation and protection: only steps and their metrics.

    Batches come from the data loader's thread, and metrics are read one step late by the writer's.
    `tools/benchmarks/bench_protection.py` measures the cost of the rest.
    """

    def __init__(self, run: Run, state: TrainState, batches: Iterator[tuple[int, Any, float]], folder: Path, last: int):
        self.run, self.state, self.done = run, state, 0
        self.compiled: jax.stages.Compiled | None = None  # replaces the run's own step if set
        self._batches, self._ends = batches, list[float]()
        self._losses = list[float]()
        self._writer = observe.MetricsWriter(
            folder, start_step=0, last_step=last, constants=constants(run, run.batch_source),
            completed=lambda _: self._ends.append(_now()), sinks=[_Losses(self._losses)])

    def steps(self, count: int) -> Steps:
        """Train `count` steps, and return when the devices have finished them."""
        self._ends.clear()
        self._losses.clear()
        waits, tokens, start = [], 0, _now()
        for _ in range(count):
            step, batch, waited = next(self._batches)
            step_of = self.compiled or compiled_step(self.run, batch)
            self.state, metrics = step_of(self.state, batch)
            self._writer.push(step + 1, metrics)
            waits.append(waited)
            tokens += batch["tokens"].size
        self._writer.flush()
        self.done += count
        return Steps(list(np.diff([start, *self._ends])), waits, list(self._losses), tokens)

    def close(self) -> None:
        """Write the last lines of metrics."""
        self._writer.close()


@dataclass
class _Losses:
    """A metrics sink that collects the losses of the lines that are written to metrics.jsonl."""

    seen: list[float]

    def write(self, record: observe.metrics.Record) -> None:
        loss = record["loss"]
        self.seen.append(np.nan if loss is None else float(loss))

    def close(self) -> None:
        pass


@contextlib.contextmanager
def training(run: Run, steps: int, one_shape: bool = False) -> Iterator[tuple[Training, JsonObject]]:
    """Yield a training loop that is ready for this many steps, and its compile time as record entries.

    `one_shape`: refuse data whose batches differ in shape.
    """
    batches = run.batch_source
    if batches.num_batches is not None and batches.num_batches < steps:
        raise UserError("--steps", f"the data ends after {batches.num_batches} batches, before {steps} steps",
                        "give fewer --steps, or more epochs in data.mixture")
    shapes_of(run).check_steps(run.batch_source, 0, steps)
    if one_shape and len(batches.shapes_of(0, steps)) > 1:
        raise UserError("data", "batches of several sequence lengths cannot be profiled or compared",
                        "measure without --profile "
                        "and --compare, or use data.packing=concat without data.stages")
    began = _now()
    with _cache_use() as cache:
        for batch in shapes_of(run).of_steps(batches, 0, steps):
            compiled_step(run, batch)
    compiled = {"compile_s": _now() - began, "compile_cached": cache["hits"] > 0 and not cache["misses"]}
    with (
        tempfile.TemporaryDirectory(prefix="jaxtrain-bench-") as folder,
        extended.drawn(run, batches, 0, steps) as each,
        contextlib.closing(Training(run, run.init(), processes.met(
            each, "first step", run.config.resilience.start_limit), Path(folder), steps)) as loop,
    ):
        yield loop, compiled


def measure(run: Run, steps: int, warmup: int, *, traced: bool = False, file: str | None = None) -> JsonObject:
    """Train `warmup` steps, measure the next `steps`, and with `traced` profile a few more; return the record.

    `file`: figures of accelerators for the predictions, as for `jaxtrain.plan --targets`.
    """
    guess, target = predicted(run, file)
    sheet = target if file or (target and target.platform != "cpu") else None  # a peak is not known for CPUs
    with training(run, warmup + steps + (1 + TRACED) * traced, one_shape=traced) as (loop, ready):
        say_once(f"compiled in {ready['compile_s']:.1f} s; {warmup} steps to warm up, then {steps} to measure")
        first = loop.steps(warmup).losses
        took = loop.steps(steps)
        peak = device_memory().get("memory_peak_bytes")
        measured = {**ready, **summary(run, took, loop.done), "memory": {
            "peak": peak, "compiler": memory_of(compiled_step(run), run)[0], "planner": guess and guess.bytes,
            "room": target and target.room, "limit": device_memory().get("memory_limit_bytes")},
            "predicted_ms": guess and 1e3 * guess.seconds,
            "loss": {"first": (first + took.losses)[0], "last": took.losses[-1]} if took.losses else None}
        if traced:
            try:
                loop.compiled = traceable(run)
                loop.steps(1)
                measured["profile"] = profile(loop.compiled, lambda: sum(loop.steps(TRACED).seconds), TRACED,
                                              dict(run.mesh.shape), sheet)
            except Exception as error:  # a failed profile must not lose the measurement
                measured["profile_failed"] = f"{type(error).__name__}: {error}"[:300]
                say(f"warning: the profile failed: {traceback.format_exc()}")
        return measured


def traceable(run: Run) -> jax.stages.Compiled:
    """Return the step, compiled so that a trace can tell its operations apart.

    On GPUs XLA launches many kernels as one graph, which a trace shows only as a whole.
    """
    if jax.default_backend() != "gpu":
        return compiled_step(run)
    try:
        return run.lower().compile(compiler_options={"xla_gpu_enable_command_buffer": ""})
    except jax.errors.JaxRuntimeError as error:
        say(f"the step is traced with kernels combined in graphs: {f'{error}'.splitlines()[0]}")
        return compiled_step(run)


def summary(run: Run, took: Steps, done: int) -> JsonObject:
    """Return step times, throughput and utilisation of the measured steps."""
    each = np.array(took.seconds)
    total = float(each.sum())
    speed = took.tokens / total
    about = constants(run, run.batch_source)(done - 1)
    shares = {"mfu": about.flops_per_token, "mfu_full": about.flops_per_token_full}
    return {
        "steps_ms": [round(1e3 * float(seconds), 4) for seconds in each],
        "step_ms": {"median": 1e3 * float(np.median(each)), "p10": 1e3 * float(np.quantile(each, 0.1)),
                    "p90": 1e3 * float(np.quantile(each, 0.9))},
        "tokens_per_step": took.tokens // len(each), "tokens_per_s": speed,
        **{name: observe.mfu(speed, flops, about.peak) if about.peak else None for name, flops in shares.items()},
        "flops_per_token": about.flops_per_token, "data_wait_ms": 1e3 * float(np.mean(took.waited)),
        "data_wait_share": sum(took.waited) / total}


def predicted(run: Run, file: str | None) -> tuple[Estimate | None, targets.Target | None]:
    """Return the planner's estimate of a step on these devices, and their target; None if it does not know them."""
    devices = list(run.mesh.devices.flat)
    try:
        target = targets.here(devices, file)
    except UserError:
        if file:
            raise
        return None, None
    return estimate(run.config, target, run.mesh.size), target


@contextlib.contextmanager
def _cache_use() -> Iterator[Counter[str]]:
    """Count the programs found ("hits") and not found ("misses") in the compilation cache in this context."""
    counts: Counter[str] = Counter()

    def heard(event: str, **_: Any) -> None:
        if event.startswith("/jax/compilation_cache/cache_"):
            counts[event.rpartition("_")[2]] += 1

    jax.monitoring.register_event_listener(heard)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_listener(heard)


def say_once(text: str) -> None:
    """Report progress from process 0 only."""
    if jax.process_index() == 0:
        say(text)


def _now() -> float:
    return time.perf_counter()
