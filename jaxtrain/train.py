"""The loop, from config to final state, on one page. The order of things matters; comments say why."""

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from jaxtrain import checkpoint, observe
from jaxtrain.build import Run, build
from jaxtrain.config import Config
from jaxtrain.data import prefetch, stages
from jaxtrain.data.batches import epochs, packing
from jaxtrain.errors import UserError
from jaxtrain.report import matmul_parameters
from jaxtrain.resilience import Interrupt
from jaxtrain.state import TrainState


class Interrupted(Exception):
    """The run was asked to stop, saved its state, and can be resumed."""

    def __init__(self, step: int, signal: int):
        self.step, self.signal = step, signal
        super().__init__(f"saved at step {step}; run the same command again to resume")


def train(config: Config, workdir: str | Path) -> TrainState:
    """Train to `train.steps`, from the newest checkpoint in `workdir` if there is one; returns the final state.

    Raises:
        Interrupted: SIGINT or SIGTERM came; everything done so far is saved.
    """
    # -------------------------------------------------------------- refuse what cannot work, before paying for anything
    run, workdir, t = build(config), Path(workdir), config.train
    c = config.checkpoint
    checkpoints = checkpoint.Checkpoints(workdir / "checkpoints", keep=c.keep, keep_every=c.keep_every, best=c.best,
                                         verify=c.verify, mirror=c.mirror)
    start = checkpoints.newest() or 0
    observe.check_workdir(workdir, config, done=start)
    snapshots = checkpoint.Snapshots(workdir, c.local_every, c.local_dir)
    recovered = snapshots.restore_newest(run.abstract, above=start)  # what was in memory may be newer than the disk's
    start = recovered[0] if recovered else start
    if t.tensorboard:
        observe.summary_writer()
    run.train_batches, run.eval_batches  # noqa: B018 (finds and tokenises the text, or says why it cannot)
    run.check_shapes(start, t.steps)
    if run.train_batches.num_batches is not None and run.train_batches.num_batches < t.steps:
        raise UserError("train.steps", f"data.mixture has an end at step {run.train_batches.num_batches}",
                        "raise the epochs of its sources or train fewer steps")
    about = observe.write_run_files(
        workdir, config, mesh_sizes=run.mesh.shape, device_kind=jax.devices()[0].device_kind,
        data_manifest_hash=run.corpus.manifest_hash, manifests=run.corpus.manifests, done=start)
    say(summary(run, workdir))
    for stage in stages.stages(config.data):
        if stage.start >= t.steps > 0:
            say(f"data.stages: the stage from step {stage.start} on is behind the last step, {t.steps}")

    # -------------------------------------------------------------------- the state: from a checkpoint, or from nothing
    if start > t.steps:
        raise UserError("train.steps", f"{t.steps} is less than the {start} steps that {workdir} has",
                        "give more steps or another --workdir")
    if found := recovered or (checkpoints.restore_newest(run.abstract) if start else None):
        if found[0] != start:  # its files are whole, and yet it does not load as it was saved: begin below it
            return train(config, workdir)
        state = found[1]
        say(f"resumed from {'the snapshot of ' if recovered else ''}step {start}")
    else:
        state = run.init()
    checkpoints.prepare(state)
    for shape in run.train_batches.shapes_of(start, t.steps):
        run.of_shape(shape).compiled_step  # noqa: B018 (compiles, while nothing else wants the processor)

    # --------------------------------------------------------------------------------------------------------- the loop
    def place(step, batches):
        return run.placed(batches, step)

    def due(step):
        return run.eval_batches is not None and (step == t.steps or (t.eval_every and step % t.eval_every == 0))

    def evaluation():
        with jax.transfer_guard("allow"):  # it waits for its numbers anyway, and places its batches on this thread
            return run.evaluate(state, t.eval_batches)

    with (
        Interrupt() as interrupt,
        contextlib.closing(snapshots),  # waits as well, but not for long
        contextlib.closing(checkpoints),  # waits: behind this block the state is on disk, whatever signals come
        prefetch(run.train_batches, start, t.steps - start, place, config.data.prefetch) as batches,
        observe.MetricsWriter(workdir, start_step=start, last_step=t.steps, constants=constants(run),
                              log_every=t.log_every, sinks=sinks(run, workdir, start)) as writer,
        jax.transfer_guard("disallow"),  # an accidental copy between host and device is an error, not a slow step
    ):
        done, blocked = start, {}
        if start and due(start) and not evaluated(workdir, start):  # a stop came between a save and its evaluation
            writer.write_eval(start, evaluation())
        for n, batch, waited in batches:
            state, metrics = run.of_shape(batch["tokens"].shape).compiled_step(state, batch)
            done = n + 1
            # Nothing here waits for the device: the writer reads the numbers on its own thread, one step late.
            writer.push(done, metrics, {"data_wait_s": waited, **blocked})
            stop = interrupt.requested(done)
            blocked = {}
            # Save before the next batch is drawn, so that what is saved and what was seen agree.
            if stop or done == t.steps or (config.checkpoint.every and done % config.checkpoint.every == 0):
                writer.flush()  # a step that is saved is never run again, so its line must be there too
                seconds = checkpoints.save(done, state, {**about, "config": config.to_dict(), **writer.last,
                                                         "step": done, "time": time.time()})
                blocked = {"checkpoint_blocked_s": seconds}  # on the next step's line
            elif snapshots.due(done):
                writer.flush()
                blocked = {"snapshot_blocked_s": snapshots.take(done, state, {**writer.last, "step": done})}
            if stop and done < t.steps:
                break
            if due(done):
                writer.write_eval(done, evaluation())
        if done == t.steps:
            checkpoints.wait()  # the last one is read back, however long it takes; a run that is stopped has no time

    # -------------------------------------------------------------------------------------------------- what came of it
    snapshots.remove()  # the state is on disk: the memory is given back
    if done < t.steps:
        raise Interrupted(done, interrupt.signal)
    if done == start:
        say(f"nothing to do: {workdir} has all {t.steps} steps")
    elif t.sample_tokens:
        from jaxtrain.sample import sample

        say("a sample:\n" + sample(run, state, length=t.sample_tokens, seed=t.seed))
    return state


def evaluated(workdir: Path, step: int) -> bool:
    """Whether metrics.jsonl has the evaluation of this step."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines() if (workdir / "metrics.jsonl").exists() else []
    return any(line.startswith(f'{{"step": {step}, ') and '"eval_loss"' in line for line in lines)


def constants(run: Run) -> Callable[[int], observe.Constants]:
    """What turns steps and seconds into tokens a second and utilisation."""
    model, batches = run.config.model, run.train_batches
    matmuls = matmul_parameters(run.abstract, run.layout, model)
    peak = observe.device_peak(jax.devices()[0].device_kind)

    def of_step(step):
        rows, seq_len = batches.shape(step)
        causal, full = (observe.flops_per_token(model, matmuls, seq_len, look) for look in (True, False))
        return observe.Constants(rows * seq_len, causal, full, peak and peak * run.mesh.size, batches.tokens(step))

    return of_step


def sinks(run: Run, workdir: Path, start: int) -> list[observe.Sink]:
    """Who else reads the metrics, in process 0."""
    t = run.config.train
    if jax.process_index() != 0:
        return []
    live: list[observe.Sink] = [observe.Progress(t.steps, start_step=start)] if t.progress and t.steps else []
    return live + ([observe.TensorBoard(workdir / "tensorboard", start_step=start)] if t.tensorboard else [])


def summary(run: Run, workdir: Path) -> str:
    """The run in three lines."""
    c, corpus = run.config, run.corpus
    count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(run.abstract.params))
    axes = " x ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items() if size > 1) or "one device"
    axes += f"; {run.pipeline}" if run.schedules else ""
    shapes = ", ".join(f"{rows} x {length}" for rows, length in run.train_batches.shapes_of(0, c.train.steps))
    return (f"{c.model.name}, {count:,} parameters in {run.precision}, on {jax.devices()[0].device_kind} ({axes})\n"
            f"{corpus.train.num_tokens:,} training and {corpus.eval.num_tokens:,} evaluation tokens; "
            f"{c.train.steps} steps of {shapes or 'no'} tokens; workdir {workdir}\n"
            f"{packing(c.data, corpus)}; {epochs(run.train_batches, c.train.steps)}")


def say(text: str) -> None:
    """To whoever watches; from one process."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)
