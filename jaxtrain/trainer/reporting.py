"""Reports of a run: its summary, its sinks of metrics, and the constants behind throughput and MFU."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain import errors, observe
from jaxtrain.base.annotations import JsonMapping
from jaxtrain.config import data_stages
from jaxtrain.data.loading.batches import epochs, packing
from jaxtrain.files.log_tail import LogTail
from jaxtrain.observe import events
from jaxtrain.observe.trackers.tracking import Tracking
from jaxtrain.plan.cost import spending
from jaxtrain.run import Run, abstract_model, name_of, slow_kernels
from jaxtrain.train_step.quantized_kernels import as_floats
from jaxtrain.train_step.report import matmul_parameters
from jaxtrain.train_step.state import TrainState
from jaxtrain.trainer.extended import makes_batches
from jaxtrain.trainer.observers import Completions
from jaxtrain.trainer.session import Session

_NEWEST = 2**16  # bytes of metrics.jsonl, in which the last losses are
_SILENT = 2.0  # seconds that compiling may take before it is told
_MANY_EPOCHS = 20  # beyond which a model mostly learns its data by heart


def constants(run: Run, batches: Any) -> Callable[[int], observe.Constants]:
    """Return a function from a step to what turns its seconds into throughput and MFU."""
    if run.own or not run.config.model.flops_known:  # so there is no MFU
        unit = _unit(run)
        return lambda step: observe.Constants(int(np.prod(batches.shape(step))), tokens_before=batches.tokens(step),
                                              unit=unit)
    model = run.config.model
    matmuls = matmul_parameters(run.abstract, run.layout, model, run.objective.frozen_axes)
    peak = observe.device_peak(jax.devices()[0].device_kind)

    def of_step(step):
        rows, seq_len = batches.shape(step)
        causal, full = (observe.flops_per_token(model, matmuls, seq_len, look) for look in (True, False))
        return observe.Constants(rows * seq_len, causal, full, peak and peak * run.mesh.size, batches.tokens(step))

    return of_step


def _unit(run: Run) -> str:
    """Return what batches are counted in: examples, where a model of the user's own has one token in each row."""
    return "examples" if run.own and run.batch_source.shape(0)[1] == 1 else "tokens"


def sinks(run: Run, session: Session, start: int, trackers: Tracking) -> list[observe.Sink]:
    """Return what gets every line of metrics besides metrics.jsonl; all but the exporter's only in process 0."""
    t = run.config.train
    found: list[observe.Sink] = [session.exported] if session.exported else []
    if jax.process_index() != 0:
        return found
    found.append(Completions(session.observers))
    if t.progress and t.steps:
        found.append(observe.Progress(t.steps, start_step=start, workdir=session.workdir, interrupt=session.interrupt))
    return [*found, trackers]


def start_of_run(run: Run, workdir: Path) -> str:
    """Describe the run, what it computes slowly, and the data stages that it will never reach."""
    steps = run.config.train.steps
    late = [f"data.stages: the stage from step {stage.start} on is behind the last step, {steps}"
            for stage in data_stages.stages(run.config.data) if stage.start >= steps > 0]
    slow = [f"slow: {sentence}" for sentence in slow_kernels.sentences(run)]
    return "\n".join([summary(run, workdir), *slow, *late, *many_epochs(run)])


def many_epochs(run: Run) -> list[str]:
    """Return a warning for each source of text of which the run makes too many epochs.

    Models of images need many, and prompts are answered anew each time.
    """
    if run.data is not None or not run.config.model.text:
        return []
    steps = run.config.train.steps
    return [f"warning: {steps} steps are {count:,.0f} epochs over {name or 'the data'}; more than {_MANY_EPOCHS} "
            "mostly teach a model to repeat it. Give more data, or fewer train.steps"
            for name, count in run.batch_source.epochs(steps).items() if count > _MANY_EPOCHS]


def describe_changes(run: Run, changes: Sequence[JsonMapping], step: int) -> str:
    """Describe what changes of a run from this step on, and its learning rates to come."""
    allowed = [change for change in changes if not change["key"].startswith("data.")]
    lines = [f"from step {step} on {change['key']}={change['after']} (was {change['before']})" for change in allowed]
    if allowed and (schedule := run.sharded.settings.schedule) is not None:
        at = sorted({step, (step + run.config.train.steps) // 2, run.config.train.steps})
        rates = [f"{np.asarray(schedule(n)):.3g} at step {n}" for n in at]
        lines.append(f"learning rate: {', '.join(rates)}")
    return "\n".join(lines)


def end_of_run(run: Run, session: Session, state: TrainState, steps: tuple[int, int], sampled: Mapping[int, str],
               early: str = "") -> str:
    """Return how the run ended, what it has cost and what to do next; or that nothing was to do.

    It has a sample of the trained model, if one is wanted.

    Args:
        steps: the steps at which this start of the run began and ended.
        sampled: samples that were taken already, by step.
        early: where and why it ended early; "" if it did not.
    """
    t, (start, end) = run.config.train, steps
    if start == end:
        return f"nothing to do: {session.workdir} " + (early or f"has all {t.steps} steps; {_longer(run, session)}")
    cost = spending.of_run(session.ledger.account(), jax.devices()[0].device_kind, run.mesh.size)
    said = [line for line in (early, cost) if line]
    if t.sample_tokens:
        said.append("a sample of what the model writes now:\n"
                    + (sampled.get(end) or sample_of(run, session, state, end)))
    return "\n".join([*said, *next_steps(run, session.workdir, end)])


def _longer(run: Run, session: Session) -> str:
    """Return how to train a finished run longer, with all that then changes where it was given as a fraction."""
    c, changes = run.config, ["train.steps"]
    if c.optimizer.warmup_steps:
        changes.append("optimizer.warmup_steps")
    length = (f"give --config.train.epochs={2 * session.epochs:g} in place of {session.epochs:g}, with"
              if session.epochs else f"add --config.train.steps={2 * c.train.steps}")
    return f"to train longer, {length} --may_change={','.join(changes)}"


def next_steps(run: Run, workdir: Path, end: int) -> list[str]:
    """Return the last losses of a run, where its checkpoint is, and commands that read it."""
    losses: dict[str, Any] = {}
    for line in LogTail(workdir / "metrics.jsonl", {"step": int}, _NEWEST).added():
        losses |= {key: line[key] for key in ("loss", "eval_loss", "reward") if key in line}
    figures = "".join(f", {key.replace('eval_', 'evaluation ')} "
                      + (f"{value:.4f}" if isinstance(value, int | float) else "not finite")
                      for key, value in losses.items())
    commands = [f"jaxtrain report {workdir}"]
    if not run.own and run.config.model.text:
        commands += [f"jaxtrain generate {workdir} --prompt=..."] * (not run.config.preference.reward_head)
        commands.append(f"jaxtrain export {workdir} --output=FOLDER")
    return [f"done: step {end}{figures}; checkpoint {workdir / 'checkpoints' / str(end)}",
            "next: " + "\n      ".join(commands)]


def sample_of(run: Run, session: Session, state: TrainState, step: int) -> str:
    """Return a text of `train.sample_tokens` tokens by the model, which is recorded as an event too."""
    from jaxtrain.hub.generate import sample

    t = run.config.train
    text = sample(run, state, length=t.sample_tokens, seed=t.seed,
                  tokenizer=session.workdir / "tokenizer" if makes_batches(run) else "")
    if jax.process_index() == 0:
        events.record(session.workdir, "sample", step=step, text=text)
    return text


def summary(run: Run, workdir: Path) -> str:
    """Describe the run in three lines: model and devices, data and how rows are made of it, steps and workdir."""
    c = run.config
    trained, count = (sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
                      for params in (run.abstract.params, as_floats(abstract_model(run))))
    count = f"{count:,} parameters" + (f", {trained:,} of them trained" if trained < count else "")
    axes = " x ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items() if size > 1) or "one device"
    axes += f"; {run.schedules[0].summary}" if run.schedules else ""
    if run.mesh.shape["context"] > 1:
        from jaxtrain.run.across_context import said

        axes += said(run)
    shapes = ", ".join(f"{rows} x {length}" for rows, length in run.batch_source.shapes_of(0, c.train.steps))
    options = " ".join(f"{name}={value}" for name, value in run.sharded.compiler_options.items())
    device = jax.devices()[0].device_kind
    head = f"{name_of(run)}, {count}, computing in {run.sharded.settings.precision}, on {device} ({axes})\n"
    head += f"compiler options: {options}\n" if options else ""
    if run.data is not None:
        if (what := _unit(run)) == "examples":
            shapes = shapes.removesuffix(" x 1")
        return f"{head}{c.train.steps} steps of {shapes or 'no'} {what}; workdir {workdir}"
    there, rows, unit = _of_data(run)
    return (f"{head}{there}; {rows}\n{c.train.steps} steps of {shapes or 'no'} {unit}, "
            f"{epochs(run.batch_source, c.train.steps)}; workdir {workdir}")


def _of_data(run: Run) -> tuple[str, str, str]:
    """Return how much there is of the config's data, how rows are made of it, and what rows are counted in."""
    data, corpus = run.config.data, run.corpus
    if not run.config.model.text:
        sequences: Any = corpus
        if run.config.model.rows_of == "images":
            from jaxtrain.data.loading.modalities import image_batches

            return *image_batches.summary(run.batch_source, sequences), "patches"
        from jaxtrain.data.loading.modalities import sequence_batches

        units = {"audio": "frames", "events": "events"}
        return *sequence_batches.summary(data, sequences), units.get(sequences.manifest["kind"], "steps")
    return (f"{corpus.train.num_tokens:,} training and {corpus.eval.num_tokens:,} evaluation tokens",
            packing(data, corpus), "tokens")


@contextlib.contextmanager
def told_if_long() -> Iterator[None]:
    """Say that the step is being compiled, and how long that took, if it takes more than a moment."""
    began = time.monotonic()
    timer = threading.Timer(_SILENT, say, ["compiling the step, which takes minutes for large models"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if (took := time.monotonic() - began) > _SILENT:
        say(f"compiled the step in {took:,.0f} s")


def say(text: str) -> None:
    """Print a line, if there is any text, from the first process."""
    if text and jax.process_index() == 0:
        errors.say(text)
