"""The training loop on one page. Its numbered order is a contract, which tests/trainer/test_order.py holds it to."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax

from jaxtrain import errors, observe
from jaxtrain.base import arguments
from jaxtrain.builder import build, check_length, with_known_length
from jaxtrain.checkpoint import CheckpointManager, LocalCheckpoints
from jaxtrain.checkpoint.save_policy import SavePolicy
from jaxtrain.config.schema import Config
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.skipped_batches import remaining
from jaxtrain.distributed import processes
from jaxtrain.objectives import MakeObjective
from jaxtrain.observe.trackers.tracker import Tracker
from jaxtrain.plan import preflight
from jaxtrain.resilience.corruption.replays import Replays
from jaxtrain.resilience.corruption.replicas import Replicas
from jaxtrain.resilience.corruption.suspects import SuspectDevices
from jaxtrain.resilience.stragglers import Stragglers
from jaxtrain.run import REPLICAS, Run, compiled_step, for_run, identity, runinfo, shapes_of
from jaxtrain.run.made_of_sections import configured
from jaxtrain.sharding.mesh import training_devices
from jaxtrain.train_step.hooks import extras_of
from jaxtrain.train_step.state import TrainState
from jaxtrain.trainer import early_stop, extended, tracked
from jaxtrain.trainer.evaluate import Evaluator, evaluation_tasks
from jaxtrain.trainer.observers import Observer
from jaxtrain.trainer.reporting import constants, end_of_run, say, sinks, start_of_run, told_if_long
from jaxtrain.trainer.resume import Start, check_workdir, find_start, initial_or_restored, resumed_data
from jaxtrain.trainer.rollback import AnomalyGuard, RolledBack
from jaxtrain.trainer.saver import Saver
from jaxtrain.trainer.session import Interrupted, Session, session_of, watched
from jaxtrain.trainer.shutdown import complete


def train(config: Config | Run, workdir: str | Path, *, objective: MakeObjective | None = None,
          optimizer: optax.GradientTransformation | None = None, data: BatchSource | None = None,
          observers: Sequence[Observer | Tracker] = (),
          may_change: Sequence[str] = (), adopt: bool = False, config_name: str = "",
          require_proof: str | Path = "", compiled: str | Path | None = None) -> TrainState:
    """Train to `train.steps`, from the newest good checkpoint in `workdir` if there is one; return the final state.

    With `train.patience` the run may end earlier, at an evaluation.

    Args:
        config: a config, or a run from `build`, which may have a model and loss function of your own.
        workdir: the folder of metrics and checkpoints.
        objective: the objective, as `build` takes it; likewise `optimizer` and `data`.
        observers: objects whose methods are called at each step, and trackers of your own.
        may_change: keys such as "train.steps" that may differ from those that the run in `workdir` was begun with.
        adopt: go on from the newest checkpoint in `workdir` even if it belongs to another run.
        config_name: what run.json calls the config, such as "configs/gpt.py:tiny".
        require_proof: the folder where `jt.prove` has left a certificate of this code and config (docs/prove.md).
        compiled: the folder of programs that `jaxtrain compile` wrote, in place of compiling them here.

    Raises:
        Interrupted: SIGINT or SIGTERM was received; everything done so far is saved.
        GivenUp: anomalies exceeded a limit of `resilience`.
        Corrupted: a device computes wrongly; what it computed is not saved.
    """
    arguments.is_path("workdir", workdir, "give the folder of the run")
    if isinstance(may_change, str):
        raise errors.UserError("may_change", f"{may_change!r} is one text", f'give a list, as in ["{may_change}"]')
    if isinstance(config, Run):
        config.sharded.check_devices()
        for name, part in (("objective", objective), ("optimizer", optimizer), ("data", data)):
            if part is not None:
                raise errors.UserError(name, "the run has one already", f"give {name}= to jt.build, or give a config")
    else:
        arguments.is_config(config)
    tracked.check_observers(observers)
    settings = config.config if isinstance(config, Run) else config
    check_length(settings)
    limits = settings.resilience
    with watched(workdir, limits) as (watchdog, ledger):
        run = for_run(config if isinstance(config, Run) else with_known_length(
            lambda config: build(config, objective=objective or configured, optimizer=optimizer, data=data),
            preflight.resolve(config, training_devices(config.rl.sampler_devices), own_parts=bool(
                objective or optimizer))), Path(workdir))
        say(preflight.check(run))
        if compiled:
            from jaxtrain.distributed.authentication import find_secret
            from jaxtrain.precompiled import compiled_run  # few runs are compiled ahead

            find_secret(Path(workdir))
            say(compiled_run.load(run, compiled))
        processes.connect(limits.start_limit)
        runinfo.make_workdir(workdir)
        with session_of(run, Path(workdir), watchdog, ledger, *tracked.apart(observers), may_change, adopt,
                        config_name, settings.train.epochs, require_proof) as session:
            while True:
                try:
                    with contextlib.ExitStack() as opened:
                        return attempt(run, session, opened)
                except RolledBack:  # begin again from an older checkpoint, with what is compiled already
                    continue


@dataclass(frozen=True)
class Begun:
    """The inputs of an attempt besides the state, whose memory the first step takes."""

    found: Start
    data: BatchSource
    about: dict[str, Any]  # what run.json and checkpoints say of the run
    checkpoints: CheckpointManager
    local: LocalCheckpoints
    trackers: tracked.Tracked
    patience: early_stop.Patience
    last: int  # the step to train to: train.steps, or where the run stopped early
    ask: Callable[[TrainState], dict[str, float]] | None  # what answers tasks in evaluations


def begin(run: Run, session: Session, opened: contextlib.ExitStack) -> tuple[TrainState, Begun]:
    """Return the state to go on from, and what the loop needs beside it, with the step compiled.

    What can be refused is refused before anything expensive begins. `opened` closes what is opened here.
    """
    t, c, workdir = run.config.train, run.config.checkpoint, session.workdir
    session.watchdog.start()
    tracked.check(run, session)
    early_stop.check(run)
    if c.best:
        early_stop.check_best(run)
    ask = evaluation_tasks(run, workdir)
    checkpoints = opened.enter_context(CheckpointManager(
        workdir / "checkpoints", keep=c.keep, keep_every=c.keep_every,
        best=c.best or early_stop.METRIC * bool(t.patience), verify=c.verify, mirror=c.mirror,
        extras=extras_of(run.extensions)))
    local = opened.enter_context(contextlib.closing(
        LocalCheckpoints(workdir, c.local_checkpoint_every, c.local_dir)))
    found = find_start(run, session, checkpoints, local)
    about, parts = check_workdir(run, session, checkpoints, found)
    trackers = opened.enter_context(tracked.Tracked(run, session, checkpoints, about))
    data = resumed_data(remaining(run.batch_source, found.skipped), found, checkpoints)
    patience = early_stop.Patience(run, workdir, found.step)
    last = found.step if patience.over else t.steps
    if found.step < last:
        session.ledger.open(t.steps)
    say(start_of_run(run, workdir))

    def compile_ahead() -> None:
        with session.phase("compile"), told_if_long():
            for batch in shapes_of(run).of_steps(data, found.step, last):
                compiled_step(run, batch)

    state = initial_or_restored(run, session, checkpoints, found, parts, about, compile_ahead)
    session.ledger.resumed(found.step)
    compile_ahead()  # now, while nothing else wants the processor
    return state, Begun(found, data, about, checkpoints, local, trackers, patience, last, ask)


def attempt(run: Run, session: Session, opened: contextlib.ExitStack) -> TrainState:
    """Train from the newest checkpoint to the end of the run, or until a rollback. `opened` closes what is opened here.
    """
    t, r, c = run.config.train, run.config.resilience, run.config.checkpoint
    workdir, watchdog, ledger, interrupt = session.workdir, session.watchdog, session.ledger, session.interrupt
    state, begun = begin(run, session, opened)
    found, data, start, checkpoints, local = begun.found, begun.data, begun.found.step, begun.checkpoints, begun.local
    patience = begun.patience
    with session.phase("compile"):
        suspects = SuspectDevices(workdir)
        replicas = Replicas(run.abstract, r.check_every, suspects, run.sharded.programs.get(REPLICAS))
        replays = Replays(r.replay_every, suspects)
    policy = SavePolicy(c, ledger, checkpoints.writing, checkpoints.failed)

    with (
        interrupt,
        ledger.book("checkpoint"),  # after the loop: the time that the last save still takes
        contextlib.closing(local),
        checkpoints,  # waits: after this block the state is on disk, whatever signals come
        extended.drawn(run, data, start, begun.last) as batches,
        observe.MetricsWriter(workdir, start_step=start, last_step=t.steps, constants=constants(run, data),
                              log_every=t.log_every, sinks=sinks(run, session, start, begun.trackers.sink),
                              completed=session.completed, ledger=ledger) as writer,
        Stragglers(workdir, r.probe_every) as stragglers,
        ledger.book("step"),
        jax.transfer_guard("disallow"),  # an accidental copy between host and device is an error, not a slow step
        session.training(),
    ):
        guard = AnomalyGuard(workdir, r, checkpoints, found.skipped, say, session.phase)
        saver = Saver(checkpoints, local, policy, writer, ledger, begun.about | {"config": identity.settings(run)},
                      found.skipped, getattr(data, "state", None))
        evaluator, done = Evaluator(run, session, writer, patience, begun.ask), start
        begun.trackers.sink.start()
        extensions = extended.Extensions(run, session)
        state = extensions.begin(start, state)
        if not patience.over and evaluator.missing(start):
            evaluator.evaluate(start, state)
        run.see(start, state)
        # Processes may take different times to get here, and their first collectives would not wait (Gloo: 30 s).
        for n, batch, waited in ledger.each("data_wait", processes.met(batches, "first step", r.start_limit)):
            if patience.over:  # by the evaluation before
                break
            watchdog.begin(n + 1)
            # 1. Observers see the batch.
            for observer in session.observers:
                observer.on_batch(n + 1, batch)
            # 2. The step is dispatched; the old state is donated to it.
            began = time.perf_counter()
            state, metrics = replays.run(n + 1, compiled_step(run, batch), state, batch)
            stragglers.step(metrics, waited, time.perf_counter() - began)
            done = n + 1
            # 3. Extensions change the state, where that is due: nothing else does between steps.
            state = extensions.after_step(done, state)
            # 4. Observers get the metrics, as futures: nothing here waits for the device.
            for observer in session.observers:
                observer.on_dispatch(done, metrics)
            # 5. The writer gets them too, and reads them one step late, on a thread of its own.
            writer.push(done, metrics, {"data_wait_s": waited, **extensions.pop_fields(),
                                        **saver.pop_fields(), **stragglers.fields}, began)
            if n == start:  # import and compile what saves and further batches need while the device computes
                with session.phase("compile"):
                    checkpoints.prepare(state)
                    batches.begin()
                writer.restart_clock(during=True)
            # 6. All processes agree on whether to stop after this step.
            stop = interrupt.requested(done)
            saving = saver.due(done, last=stop or done == t.steps or (patience.watches and evaluator.due(done)))
            if saving:
                state = extensions.before_save(done, state)
            with session.saving() if saving else contextlib.nullcontext():
                # 7. Checks may end the attempt. What is saved was checked up to its last step; that waits for it.
                guard.look(done, metrics)
                replicas.check(done, state, now=saving)
                if saving:
                    guard.look_at_all()
                    # 8. The metrics are on disk before the state: a step that is saved is never run again.
                    writer.flush()
                    # 9. Save before the next batch is drawn, so that the state and the batches seen agree.
                    saver.save(done, state)
            if stop and done < t.steps:
                break
            # 10. Evaluate, and look at the state for the trackers.
            if evaluator.due(done):
                evaluator.evaluate(done, state)
            if begun.trackers.look(done, state, batch):
                writer.restart_clock()
            # 11. Data that are made with the state, such as the model's own answers, see it before the next batch.
            run.see(done, state)
        ended = done == t.steps or patience.over
        if ended:
            with session.phase("checkpoint"):  # the last one is read back, however long that takes
                saver.finish(done, state, lambda seconds: session.pause(done, seconds))
                extensions.ended()
                # The first process copies it to the mirror; at their exit JAX gives the others five minutes only.
                processes.meet("end", r.start_limit)

    if ended:
        complete()
    local.remove()  # the state is on disk
    if not ended:
        raise Interrupted(done, interrupt.signal)
    if patience.over and start < begun.last:
        patience.record()
    ledger.ending = end_of_run(run, session, state, (start, done), begun.trackers.sampled, patience.reason(checkpoints))
    return state
