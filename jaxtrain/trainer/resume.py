"""Resuming from a workdir: find the newest checkpoint, check that it belongs to this run, and restore it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxtrain.base.annotations import JsonObject, PyTree
from jaxtrain.checkpoint import CheckpointManager, LocalCheckpoints
from jaxtrain.config.sections.tuning_keys import tuned_from_nothing
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.skipped_batches import SkippedBatches, remaining
from jaxtrain.data.tokenizers import tokenizer_folder
from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError
from jaxtrain.observe.versions import git_commit
from jaxtrain.run import Begun, Run, identity, runinfo, shapes_of
from jaxtrain.run.runinfo import OtherRun, nothing_trained, withdraw_run_files
from jaxtrain.train_step.state import TrainState
from jaxtrain.trainer import extended
from jaxtrain.trainer.reporting import describe_changes, say
from jaxtrain.trainer.rollback import RolledBack, agree, apply_pending_rollback
from jaxtrain.trainer.session import Session


@dataclass(frozen=True)
class Start:
    """The state and step at which an attempt begins."""

    step: int  # 0: nothing is saved
    recovered: tuple[int, Any, dict[str, Any]] | None  # from memory, where that is newer than what is on disk
    skipped: SkippedBatches

    def meta(self, checkpoints: CheckpointManager) -> JsonObject:
        """Return what was saved beside the state."""
        return self.recovered[2] if self.recovered else checkpoints.meta(self.step) if self.step else {}


def find_start(run: Run, session: Session, checkpoints: CheckpointManager, local: LocalCheckpoints) -> Start:
    """Find the newest checkpoint, on disk or in memory; one from memory is loaded at once."""
    skipped = apply_pending_rollback(session.workdir, checkpoints)
    with session.phase("restore"):
        try:
            step, none_good = checkpoints.newest() or 0, None
        except UserError as error:
            step, none_good = 0, error
        recovered = local.restore_newest(run.abstract, above=step)
        if none_good and not recovered:
            raise none_good
    return Start(recovered[0] if recovered else step, recovered, skipped)


def check_workdir(run: Run, session: Session, checkpoints: CheckpointManager,
                  start: Start) -> tuple[JsonObject, JsonObject]:
    """Refuse a workdir, or data, with which the run cannot go on, and write the run's files.

    Returns what these say of the run, and the description of its objective, optimizer, data and model, where they are
    not the config's.
    """
    config, t = run.config, run.config.train
    reach = start.skipped.reach(start.step)  # in batches, of which rollbacks may have skipped some
    saved = start.meta(checkpoints)
    if not start.step:
        say(exchange(None, lambda _: _begun_anew(run, session)))
    known, saved = exchange(None, lambda _: runinfo.identity(session.workdir, saved, session.adopt))
    if not (t.init_from or t.init_encoder_from) and not start.step and known.get("init_from"):
        raise UserError("train.init_from", f"the run in {session.workdir} began with other parameters and has no "
                        "checkpoint yet", "give it again, or another --workdir")
    if not start.step and (begins := {key: value for one in run.extensions for key, value in one.begins_with(
            run).items()}):
        known["init_from"] = begins
    parts = identity.own_parts(run, runinfo.recorded_parts(session.workdir, saved) or {})
    if session.config_name:
        known["config_file"] = session.config_name
    if session.require_proof or Path("proofs").is_dir():
        from jaxtrain.run import certificate

        known |= certificate.for_run(run, session.require_proof)
    changes = runinfo.check_workdir(session.workdir, config, done=reach, parts=parts, keys=identity.settings(run),
                                    saved=saved, may_change=session.may_change)
    with ThreadPoolExecutor(1, "git") as thread:
        commit = thread.submit(git_commit)  # a program of its own, which looks at every file of a checkout
        run.batch_source, run.eval_batches  # noqa: B018 (finds and tokenises the text, or says why it cannot)
    shapes_of(run).check_steps(run.batch_source, reach, start.skipped.reach(t.steps))
    batches = remaining(run.batch_source, start.skipped).num_batches
    if batches is not None and batches < t.steps:
        which, fix = ("data.mixture ends", "raise the epochs of its sources or train fewer steps") if run.data is None \
            else ("the batches given by data= end", f"train {batches} steps or fewer, or give more")
        raise UserError("train.steps", f"{which} at step {batches}", fix)
    about = runinfo.write_run_files(
        session.workdir, config, mesh_sizes=run.mesh.shape, device_kind=jax.devices()[0].device_kind,
        data_manifest_hash=None if run.data is not None else run.corpus.manifest_hash,
        manifests=identity.manifests(run), done=reach, parts=parts, keys=identity.settings(run), saved=saved,
        known=known, may_change=session.may_change,
        compiler_options=run.sharded.compiler_options, commit=commit.result)
    source = run.corpus if run.data is None else run.data
    if (tokenizer := getattr(source, "tokenizer", None)) is not None and jax.process_index() == 0:
        tokenizer_folder.save(tokenizer, session.workdir / "tokenizer", getattr(source, "chat", None))
    for one in run.extensions if not start.step else ():
        say(exchange(None, lambda _, one=one: one.keep_files(run, session.workdir)))
    say(describe_changes(run, changes, start.step))
    if start.step > t.steps:
        raise UserError("train.steps", f"{t.steps} is less than the {start.step} steps that {session.workdir} has",
                        "give more steps or another --workdir")
    return about, parts


def resumed_data(data: BatchSource, start: Start, checkpoints: CheckpointManager) -> BatchSource:
    """Return the data; those that are read in order go on where the checkpoint was saved."""
    if start.step and hasattr(data, "restore") and (state := start.meta(checkpoints).get("data_state")) is not None:
        data.restore(start.step, state)
    return data


def _begun_anew(run: Run, session: Session) -> str:
    """Forget a run of another config that failed before its first step; return what to say of that.

    What extensions make with a state before its first step is not forgotten.
    """
    makes = extended.makes_batches(run) or any(one.keeps for one in run.extensions)
    if makes or not nothing_trained(session.workdir):
        return ""
    try:
        parts = identity.own_parts(run, runinfo.recorded_parts(session.workdir) or {})
        runinfo.check_workdir(session.workdir, run.config, parts=parts, keys=identity.settings(run),
                              may_change=session.may_change)
    except OtherRun as refused:
        withdraw_run_files(session.workdir)
        return f"{refused.reason}; that one has trained nothing, and a new run begins"
    return ""


def initial_or_restored(run: Run, session: Session, checkpoints: CheckpointManager, start: Start,
                        parts: dict[str, PyTree], about: JsonObject, compile_ahead: Callable[[], None]) -> TrainState:
    """Return the state that the run starts from, once what its batches need of the state at step 0 is there.

    `compile_ahead`: called where that saves time; not before what is read is known to fit.

    Raises:
        RolledBack: the checkpoint cannot be used after all; begin again, from an older one.
    """
    def prepare(state: TrainState | None) -> None:
        begun = Begun(start.step, start.skipped, parts, about.get("init_from"), session.watchdog.phase)
        for one in run.extensions:
            one.prepare(state, begun)

    if not start.step:
        if (section := tuned_from_nothing(run.config)) and run.own is None:
            say(f"warning: {section} tunes a model with random parameters; set train.init_from to start from a "
                "trained one")
        try:
            state = run.init(parts=parts, meanwhile=compile_ahead)
        except UserError:  # train.init_from does not fit: another config may be what is wanted
            withdraw_run_files(session.workdir)
            raise
        prepare(state)
        return state
    prepare(None)
    with session.phase("restore"):
        restored = start.recovered or checkpoints.restore_newest(run.abstract)
    if restored is None or restored[0] != start.step:
        if exchange(start.step in checkpoints.steps())[0]:
            raise UserError("checkpoint", f"step {start.step} is damaged, and its folder cannot be renamed",
                            f"move {session.workdir}/checkpoints/{start.step} away")
        raise RolledBack  # its files are whole, but it does not load as it was saved
    _, state, meta = restored
    if (found := int(jax.device_get(state.step))) != start.step:
        raise UserError("checkpoint", f"step {start.step} in {session.workdir} holds the state of step {found}",
                        "move it away, and the run resumes from the checkpoint before it")
    agree(session.workdir, start.skipped, meta, start.step)
    say(f"resumed from {'the snapshot of ' if start.recovered else ''}step {start.step}")
    return state
