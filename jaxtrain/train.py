"""The loop, from config to final state, on one page. The order of things matters; comments say why."""

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jaxtrain import checkpoint, distributed, errors, observe
from jaxtrain.build import Run, build
from jaxtrain.checkpoint.interval import Saves
from jaxtrain.config import Config
from jaxtrain.data import prefetch, stages
from jaxtrain.data.batch_source import BatchSource
from jaxtrain.data.batches import epochs, packing
from jaxtrain.data.passed_over import remaining
from jaxtrain.errors import UserError
from jaxtrain.exchange import exchange
from jaxtrain.objectives import MakeObjective, NextToken
from jaxtrain.observe.ledger import Ledger
from jaxtrain.observers import Completions, Observer
from jaxtrain.plan import here
from jaxtrain.report import matmul_parameters
from jaxtrain.resilience import exits
from jaxtrain.resilience.accusations import Accusations
from jaxtrain.resilience.alone import alone
from jaxtrain.resilience.interrupt import Interrupt, complete
from jaxtrain.resilience.replays import Replays
from jaxtrain.resilience.replicas import Replicas
from jaxtrain.resilience.rollback import Guard, RolledBack, agree, settle
from jaxtrain.resilience.stragglers import Stragglers
from jaxtrain.resilience.watchdog import Watchdog
from jaxtrain.state import TrainState


class Interrupted(exits.Ended):
    """The run was asked to stop, saved its state, and can be resumed."""

    def __init__(self, step: int, number: int):
        self.step, self.signal = step, number
        super().__init__(exits.INTERRUPTED if number == signal.SIGINT else exits.SAVED,
                         f"saved at step {step}; run the same command again to resume")


def train(config: Config | Run, workdir: str | Path, *, objective: MakeObjective | None = None,
          optimizer: optax.GradientTransformation | None = None, data: BatchSource | None = None,
          observers: Sequence[Observer] = ()) -> TrainState:
    """Train to `train.steps`, from the newest good checkpoint in `workdir` if there is one; returns the final state.

    Args:
        config: or a run that `build` made of one, which may have a model and loss function of one's own.
        workdir: where metrics and checkpoints go.
        objective: what is minimised, as `build` takes it; so are `optimizer` and `data`.
        observers: are told of each step.

    Raises:
        Interrupted: SIGINT or SIGTERM came; everything done so far is saved.
        GivenUp: anomalies went on beyond a limit of `resilience`.
        Corrupted: a device computes wrongly; what it computed is not saved.
    """
    if isinstance(config, Run):
        config.check_devices()
        for name, part in (("objective", objective), ("optimizer", optimizer), ("data", data)):
            if part is not None:
                raise UserError(name, "the run has one already", f"give {name}= to jt.build, or give a config")
    resilience = (config.config if isinstance(config, Run) else config).resilience
    with (
        Watchdog(workdir, resilience) as watchdog,  # from here to the end, a run that hangs is ended
        Ledger(workdir, stopped=(Interrupted, KeyboardInterrupt, SystemExit)) as ledger,  # every second is in a book
    ):
        run = config if isinstance(config, Run) else build(
            config, objective=objective or NextToken.of, optimizer=optimizer, data=data)
        if (predicted := here.check(run)) and jax.process_index() == 0:
            errors.say(predicted)
        distributed.connect(resilience.start_limit)
        observe.make_workdir(workdir)
        interrupt = Interrupt()
        with alone(workdir):
            while True:
                try:
                    with contextlib.ExitStack() as begun:  # what an attempt leaves open that does not come to its loop
                        return attempt(run, Path(workdir), watchdog, ledger, interrupt, begun, observers)
                except RolledBack:  # to go back is to start again, but for what is compiled
                    continue


def attempt(run: Run, workdir: Path, watchdog: Watchdog, ledger: Ledger, interrupt: Interrupt,
            begun: contextlib.ExitStack, observers: Sequence[Observer] = ()) -> TrainState:
    """From the newest checkpoint to the end, or to a rollback."""
    @contextlib.contextmanager
    def phase(name):  # what is not a step is accounted for under its name, and has more time before it counts as hung
        with ledger.book(name), watchdog.phase(name):
            yield

    # -------------------------------------------------------------- refuse what cannot work, before paying for anything
    config, t, r, c = run.config, run.config.train, run.config.resilience, run.config.checkpoint
    watchdog.start()
    checkpoints = begun.enter_context(checkpoint.Checkpoints(
        workdir / "checkpoints", keep=c.keep, keep_every=c.keep_every, best=c.best, verify=c.verify, mirror=c.mirror,
        extras=run.extras))
    passed = settle(workdir, checkpoints)
    with phase("restore"):
        start, none_good = 0, None
        try:
            start = checkpoints.newest() or 0
        except UserError as error:
            none_good = error
        snapshots = begun.enter_context(contextlib.closing(checkpoint.Snapshots(workdir, c.local_every, c.local_dir)))
        # What was in memory may be newer than what is on disk.
        recovered = snapshots.restore_newest(run.abstract, above=start)
        if none_good and not recovered:
            raise none_good
        start = recovered[0] if recovered else start
    reach = passed.reach(start)  # in batches, where rollbacks passed over some
    saved = recovered[2] if recovered else checkpoints.meta(start) if start else {}
    parts = run.own_parts(observe.recorded_parts(workdir, saved) or {})
    observe.check_workdir(workdir, config, done=reach, parts=parts, keys=run.settings, saved=saved)
    if t.tensorboard:
        observe.summary_writer()
    run.train_batches, run.eval_batches  # noqa: B018 (finds and tokenises the text, or says why it cannot)
    data = remaining(run.train_batches, passed)
    run.check_shapes(reach, passed.reach(t.steps))
    if data.num_batches is not None and data.num_batches < t.steps:
        which, fix = ("data.mixture has", "raise the epochs of its sources or train fewer steps")
        if run.data is not None:
            which, fix = "the batches given by data= have", f"train {data.num_batches} steps or fewer, or give more"
        raise UserError("train.steps", f"{which} an end at step {data.num_batches}", fix)
    about = observe.write_run_files(
        workdir, config, mesh_sizes=run.mesh.shape, device_kind=jax.devices()[0].device_kind,
        data_manifest_hash=None if run.data is not None else run.corpus.manifest_hash, manifests=run.manifests,
        done=reach, parts=parts, keys=run.settings, saved=saved)
    if start < t.steps:
        ledger.open(t.steps)
    say(summary(run, workdir))
    for stage in stages.stages(config.data):
        if stage.start >= t.steps > 0:
            say(f"data.stages: the stage from step {stage.start} on is behind the last step, {t.steps}")

    # -------------------------------------------------------------------- the state: from a checkpoint, or from nothing
    if start > t.steps:
        raise UserError("train.steps", f"{t.steps} is less than the {start} steps that {workdir} has",
                        "give more steps or another --workdir")
    if start:
        with phase("restore"):
            restored = recovered or checkpoints.restore_newest(run.abstract)
        if restored is None or restored[0] != start:
            if exchange(start in checkpoints.steps())[0]:
                raise UserError("checkpoint", f"step {start} is damaged, and its folder cannot be renamed",
                                f"move {workdir}/checkpoints/{start} away")
            raise RolledBack  # its files are whole, and yet it does not load as it was saved: begin below it
        _, state, meta = restored
        agree(workdir, passed, meta, start)
        say(f"resumed from {'the snapshot of ' if recovered else ''}step {start}")
    else:
        state = run.init(parts=parts)
    ledger.resumed(start)
    with phase("compile"):
        run.compile_ahead(data, start, t.steps)  # now, while nothing else wants the processor
        checkpoints.prepare(state)
        accusations = Accusations(workdir)
        replicas = Replicas(run.abstract, r.check_every, accusations)
        replays = Replays(r.replay_every, accusations)

    # --------------------------------------------------------------------------------------------------------- the loop
    def place(step, batches):
        return run.placed(batches, step)

    def due(step):
        return run.eval_batches is not None and (step == t.steps or (t.eval_every and step % t.eval_every == 0))

    def evaluation():
        with jax.transfer_guard("allow"):  # it waits for its numbers anyway, and places its batches on this thread
            with phase("compile"):
                run.compiled_eval  # noqa: B018 (at the first one)
                distributed.meet("evaluation", r.start_limit)
            with phase("eval"):
                return run.evaluate(state, t.eval_batches)

    def pause(seconds):
        with ledger.book("other"):
            for rest in np.arange(seconds, 0, -1):
                if interrupt.requested(done):
                    return False
                time.sleep(min(rest, 1))
        return True

    saves = Saves(c, ledger, checkpoints.writing, checkpoints.failed, workdir=workdir, start=start)
    with (
        interrupt,
        ledger.book("checkpoint"),  # behind the loop: what it still takes to write the last one
        contextlib.closing(snapshots),  # waits as well, but not for long
        checkpoints,  # waits: behind this block the state is on disk, whatever signals come
        prefetch(data, start, t.steps - start, place, config.data.prefetch) as batches,
        observe.MetricsWriter(workdir, start_step=start, last_step=t.steps, constants=constants(run, data),
                              log_every=t.log_every, sinks=sinks(run, workdir, start, observers),
                              completed=watchdog.completed, ledger=ledger) as writer,
        Stragglers(workdir, r.straggler_factor, r.probe_every) as stragglers,
        ledger.book("step"),
        jax.transfer_guard("disallow"),  # an accidental copy between host and device is an error, not a slow step
        watchdog.training(),
    ):
        done, meta, guard = start, {}, Guard(workdir, r, checkpoints, passed, say, phase)
        # A stop came between a save and its evaluation. (All must know the same; files may be late on other machines.)
        if start and due(start) and not exchange(evaluated(workdir, start))[0]:
            writer.write_eval(start, evaluation())
        # It takes one process longer than another, and their first collectives would not wait (Gloo: 30 seconds).
        for n, batch, waited in ledger.each("data_wait", distributed.met(batches, "first step", r.start_limit)):
            watchdog.begin(n + 1)
            for observer in observers:
                observer.on_batch(n + 1, batch)
            began = time.perf_counter()
            state, metrics = replays.run(n + 1, run.compiled(batch), state, batch)
            stragglers.step(metrics, waited, time.perf_counter() - began)
            done = n + 1
            for observer in observers:
                observer.on_dispatch(done, metrics)
            # Nothing here waits for the device: the writer reads the numbers on its own thread, one step late.
            writer.push(done, metrics, {"data_wait_s": waited, **saves.told(), **snapshots.told(), **stragglers.fields})
            guard.look(done, metrics)  # at the step before the last: its numbers are there
            stop = interrupt.requested(done)
            saving = stop or done == t.steps or saves.due(done)
            keeping = saving or snapshots.due(done)
            replicas.check(done, state, now=keeping)
            # Save before the next batch is drawn, so that what is saved and what was seen agree.
            if keeping:
                with watchdog.phase("save"):
                    writer.flush()  # a step that is saved is never run again, so its line must be there too
                    guard.look_at_all()  # nor is it looked at again
                    meta = {**about, **writer.last, "config": run.settings, "step": done, "time": time.time(),
                            "goodput": ledger.goodput(), "passed_over": passed.to_dict()}
                    if saving:
                        with saves.taking(done):
                            checkpoints.save(done, state, meta)
                    elif not writer.behind:  # of process 0 there is none then, so that nobody goes on from this one
                        snapshots.take(done, state, meta)
            if stop and done < t.steps:
                break
            if due(done):
                writer.write_eval(done, evaluation())
        if done == t.steps:
            with phase("checkpoint"):  # the last one is read back, however long it takes; else there is no time for it
                checkpoints.insist(done, state, meta, pause)
                # The first process copies it to the mirror; at their exit JAX gives the others five minutes only.
                distributed.meet("end", r.start_limit)

    # -------------------------------------------------------------------------------------------------- what came of it
    if done == t.steps:
        complete()
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


def constants(run: Run, batches: Any) -> Callable[[int], observe.Constants]:
    """What turns steps and seconds into tokens a second and utilisation."""
    if run.own_model:  # what its arithmetic takes is not known, so there is no utilisation
        return lambda step: observe.Constants(int(np.prod(batches.shape(step))), tokens_before=batches.tokens(step))
    model = run.config.model
    matmuls = matmul_parameters(run.abstract, run.layout, model)
    peak = observe.device_peak(jax.devices()[0].device_kind)

    def of_step(step):
        rows, seq_len = batches.shape(step)
        causal, full = (observe.flops_per_token(model, matmuls, seq_len, look) for look in (True, False))
        return observe.Constants(rows * seq_len, causal, full, peak and peak * run.mesh.size, batches.tokens(step))

    return of_step


def sinks(run: Run, workdir: Path, start: int, observers: Sequence[Observer] = ()) -> list[observe.Sink]:
    """Who else reads the metrics, in process 0."""
    t = run.config.train
    if jax.process_index() != 0:
        return []
    told: list[observe.Sink] = [Completions(observers)] if observers else []
    live: list[observe.Sink] = [observe.Progress(t.steps, start_step=start)] if t.progress and t.steps else []
    return told + live + ([observe.TensorBoard(workdir / "tensorboard", start_step=start)] if t.tensorboard else [])


def summary(run: Run, workdir: Path) -> str:
    """The run in three lines."""
    c = run.config
    count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(run.abstract.params))
    axes = " x ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items() if size > 1) or "one device"
    axes += f"; {run.pipeline}" if run.schedules else ""
    shapes = ", ".join(f"{rows} x {length}" for rows, length in run.train_batches.shapes_of(0, c.train.steps))
    head = f"{run.name}, {count:,} parameters in {run.precision}, on {jax.devices()[0].device_kind} ({axes})\n"
    if run.data is not None:
        what = "examples" if run.own_model and shapes.endswith(" x 1") else "tokens"
        return f"{head}{c.train.steps} steps of {shapes.removesuffix(' x 1') or 'no'} {what}; workdir {workdir}"
    corpus = run.corpus
    return (f"{head}{corpus.train.num_tokens:,} training and {corpus.eval.num_tokens:,} evaluation tokens; "
            f"{c.train.steps} steps of {shapes or 'no'} tokens; workdir {workdir}\n"
            f"{packing(c.data, corpus)}; {epochs(run.train_batches, c.train.steps)}")


def say(text: str) -> None:
    """To whoever watches; from one process."""
    if jax.process_index() == 0:
        errors.say(text)
