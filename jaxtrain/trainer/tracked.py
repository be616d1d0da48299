"""Uploads to a run's trackers besides its lines: histograms, samples of text, checkpoints, and how it ended."""

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxtrain.base import arguments
from jaxtrain.base.annotations import JsonMapping
from jaxtrain.checkpoint import CheckpointManager, verify
from jaxtrain.distributed import processes
from jaxtrain.errors import UserError
from jaxtrain.observe import trackers
from jaxtrain.observe.trackers import histograms
from jaxtrain.observe.trackers.tracker import About, Tracker
from jaxtrain.observe.trackers.tracking import Tracking
from jaxtrain.redaction import redacted
from jaxtrain.run import Run, identity
from jaxtrain.train_step.sharded_step import shape_of
from jaxtrain.train_step.state import Batch, TrainState
from jaxtrain.trainer.observers import Observer
from jaxtrain.trainer.reporting import sample_of
from jaxtrain.trainer.rollback import RolledBack
from jaxtrain.trainer.session import STOPPED, Session

# What a tracker is told of a checkpoint.
_ABOUT = "run", "config_hash", "git_commit", "data_manifest_hash", "loss", "tokens", "examples", "time"


def check(run: Run, session: Session) -> None:
    """Refuse trackers that are not installed, and histograms and samples that nobody would get."""
    c = run.config.observe
    trackers.check(c.trackers)
    for key in ("histograms_every", "samples_every"):
        if getattr(c, key) and not (c.trackers or session.trackers):
            raise UserError(f"observe.{key}", "there is no tracker to show them", "name one in observe.trackers, or "
                            "leave it out")
    if c.histograms != ["weights"] and not c.histograms_every:
        raise UserError("observe.histograms", "it is read with observe.histograms_every only", "give the steps too, or "
                        "leave it out")
    if not c.histograms:
        raise UserError("observe.histograms", "it is empty", "name weights or gradients, or leave it out")
    if c.samples_every and run.data is not None:
        raise UserError("observe.samples_every", "batches given by data= have no tokenizer", "leave it out")
    if c.samples_every and run.own:
        raise UserError("observe.samples_every", "a model of your own generates no text", "leave it out")
    if c.samples_every and not run.config.train.sample_tokens:
        raise UserError("observe.samples_every", "train.sample_tokens is 0", "give the length of a sample there")


def check_observers(watching: object) -> None:
    """Refuse what is not a list of observers and trackers."""
    fix = "give a list of objects of classes that derive from jt.Observer or jt.Tracker"
    if not isinstance(watching, Sequence) or isinstance(watching, str):
        raise UserError("observers", f"it is {arguments.kind(watching)}, not a list", fix)
    for one in watching:
        if isinstance(one, type) or not (isinstance(one, Tracker) or hasattr(one, "on_batch")):
            raise UserError("observers", f"{arguments.kind(one)} is not an observer", fix)


def apart(watching: Sequence[Observer | Tracker]) -> tuple[list[Observer], list[Tracker]]:
    """Return the observers, which are told of each step in the loop, and the trackers among what watches a run."""
    return ([one for one in watching if not isinstance(one, Tracker)],
            [one for one in watching if isinstance(one, Tracker)])


class Tracked:
    """The trackers of an attempt, and what is looked at for them; a context manager."""

    def __init__(self, run: Run, session: Session, checkpoints: CheckpointManager, about: JsonMapping):
        """Set up; only the first process has trackers, but all of them make all calls, at the same steps."""
        c = run.config.observe
        first = jax.process_index() == 0
        self._run, self._session = run, session
        self._compiled = set[Any]()  # the shapes of batches for which histograms are compiled
        self.sampled: dict[int, str] = {}  # the newest sample, by its step
        self.sink = Tracking(
            About(about["run"], redacted(c.name) or session.workdir.absolute().name, redacted(c.project),
                  session.workdir, redacted(identity.settings(run)), redacted(dict(about))),
            [*(trackers.made(name, run.config.plug_ins.get(name)) for name in c.trackers), *session.trackers]
            if first else [])
        if self.sink:
            checkpoints.on_good.append(self._saved)

    def __enter__(self) -> "Tracked":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        ends = {type(None): "finished", RolledBack: "rolled_back", **dict.fromkeys(STOPPED, "stopped")}
        with self._session.watchdog.phase("trackers"):  # after an error there is little time otherwise
            self.sink.finish(ends.get(type(error), "failed"))

    def look(self, step: int, state: TrainState, batch: Batch) -> bool:
        """Take the histograms and the sample that are due after this step; return whether any are."""
        c = self._run.config.observe
        due = [bool(every and step % every == 0) for every in (c.histograms_every, c.samples_every)]
        if due[0]:
            with jax.transfer_guard("allow"):
                self._histograms(step, state, batch)
        if due[1]:
            with jax.transfer_guard("allow"), self._session.phase("eval"):
                self.sampled = {step: sample_of(self._run, self._session, state, step)}
            self.sink.add("text", step, "sample", redacted(self.sampled[step]))
        return any(due)

    def _histograms(self, step: int, state: TrainState, batch: Batch) -> None:
        run, kinds = self._run, self._run.config.observe.histograms
        if (shape := shape_of(batch)) not in self._compiled:
            with self._session.phase("compile"):
                if "weights" in kinds:
                    histograms.prepare(state.params, run.mesh)
                if "gradients" in kinds:
                    places = run.sharded.compiled_gradient(batch).output_shardings[1]
                    histograms.prepare(jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(
                        x.shape, x.dtype, sharding=place), state.params, places), run.mesh)
                processes.meet("histograms", run.config.resilience.start_limit)
            self._compiled.add(shape)
        with self._session.phase("eval"):
            trees = {"weights": lambda: state.params,
                     "gradients": lambda: run.sharded.value_and_grad(state, batch)[1]}
            found = {kind: histograms.histograms(trees[kind](), run.mesh) for kind in kinds}
            jax.block_until_ready(found)  # so that their time counts as this, and not as that of the next step
        for kind, counted in found.items() if self.sink else ():
            for path, (counts, edges) in histograms.read(counted).items():
                self.sink.add("histogram", step, f"{kind}/{path}", counts, edges)

    def _saved(self, step: int, folder: Path) -> None:
        """Tell of a good checkpoint by reference; its hash is that of the list of its files' hashes."""
        about: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            meta = verify.saved_meta(folder)
            about = {key: meta[key] for key in _ABOUT if key in meta}
            about["sha256"] = hashlib.sha256((folder / "good.json").read_bytes()).hexdigest()
        self.sink.add("artifact", step, folder.as_uri(), redacted(about))
