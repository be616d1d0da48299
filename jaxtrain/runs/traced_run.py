"""Trace documents to the steps of a run that saw them, or will, and to the checkpoint from before the first of them.

Steps count from 0, as `jaxtrain inspect` shows them; metrics.jsonl has what was computed at step n as its step n + 1,
and checkpoint n has the steps below n.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.base.annotations import JsonMapping, JsonObject
from jaxtrain.checkpoint import verify
from jaxtrain.config.load import load_config
from jaxtrain.config.schema import Config, DataConfig
from jaxtrain.data.corpus.corpus import Corpus, is_corpus
from jaxtrain.data.corpus.sequences import FORMAT as SEQUENCES
from jaxtrain.data.corpus.sequences import open_sequences
from jaxtrain.data.corpus.text_cache import cache_root, load_corpus
from jaxtrain.data.loading.batch_source import BatchSource
from jaxtrain.data.loading.configured import configured_batches, configured_corpus
from jaxtrain.data.loading.epochs import steps_in
from jaxtrain.data.loading.skipped_batches import SkippedBatches
from jaxtrain.data.tracing.inverse_batches import Sighting, sightings
from jaxtrain.data.tracing.sequence_documents import as_documents
from jaxtrain.data.tracing.stretches import Stretch
from jaxtrain.distributed.run_lock import locked
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import LARGE, user_json
from jaxtrain.files.shipped_configs import is_named
from jaxtrain.run.runinfo import OtherRun, changes_of
from jaxtrain.runs.recorded_run import RecordedRun
from jaxtrain.runs.run_index import TAIL
from jaxtrain.runs.unused_checkpoints import UnusedCheckpoint, turned_back, unused_checkpoints

MOST = 8  # batches that are skipped for each step of the run


@dataclass(frozen=True)
class Seen:
    """A row of a batch with some of a stretch: of which step it is, and where in the row it is."""

    step: int | None  # None: the run skips the batch (skipped_batches.json)
    batch: int
    row: int
    epoch: int
    positions: tuple[int, int]
    token: int  # the token of the split at the first of these positions
    lost: bool  # the row is corrupt, and has no loss
    island: int | None

    @property
    def counts(self) -> bool:
        """Whether it is trained on."""
        return self.step is not None and not self.lost


@dataclass(frozen=True)
class Redo:
    """The steps to train again so that the state has nothing of what was seen."""

    first: int  # the first step that saw it
    done: int  # steps that are done
    checkpoint: int | None  # the last good one from before; None: there is none, and the run begins again
    newer: tuple[int, ...]  # checkpoints that have it


@dataclass(frozen=True)
class TracedRun:
    """A corpus, and the run that trains on it, where there is one."""

    corpus: Corpus
    data: DataConfig
    batches: BatchSource | None = None  # all of them, also those that are skipped; None: a corpus without a run
    steps: int = 0  # that the run is to make
    done: int = 0  # of them
    workdir: Path | None = None  # None: the run has not begun
    skipped: SkippedBatches = dataclasses.field(default_factory=SkippedBatches)
    checkpoints: tuple[int, ...] = ()  # that are good
    unused: tuple[UnusedCheckpoint, ...] = ()
    init_from: str = ""  # where its parameters came from
    text: bool = True  # whether documents are text; otherwise each is a prepared sequence

    def seen(self, stretches: Sequence[Stretch]) -> list[list[Seen]]:
        """Return for each stretch where the run has it, in the order of its batches."""
        assert self.batches is not None
        found: list[list[Seen]] = [[] for _ in stretches]
        skipped = set(self.skipped.batches)
        for one in sightings(self.batches, stretches, self.skipped.reach(self.steps)):
            found[one.stretch].append(self._seen(one, skipped))
        for some in found:
            some.sort(key=lambda one: (one.batch, one.island or 0, one.row, one.positions))
        return found

    def _seen(self, one: Sighting, skipped: set[int]) -> Seen:
        passed_over = sum(other < one.batch for other in self.skipped.batches)
        return Seen(None if one.batch in skipped else one.batch - passed_over, one.batch, one.row, one.epoch,
                    (one.span.begin, one.span.end), one.span.token, one.lost, one.island)

    def redo(self, seen: Sequence[Seen]) -> Redo | None:
        """Return what to train again because of what was seen; None: no step that is done saw it."""
        past = [one.step for one in seen if one.counts and one.step is not None and one.step < self.done]
        if not past:
            return None
        before = [step for step in self.checkpoints if step <= min(past)]
        return Redo(min(past), self.done, max(before, default=None),
                    tuple(step for step in self.checkpoints if step > min(past)))

    def unused_with(self, seen: Sequence[Seen]) -> tuple[str, ...]:
        """Return the names of the checkpoints that the run no longer uses, but that may have what was seen."""
        batches = sorted({one.batch for one in seen if not one.lost})
        return tuple(one.name for one in self.unused if one.may_have(batches))

    def skip(self, stretches: Sequence[Stretch], workdir: Path) -> tuple[int, ...]:
        """Have the run in a workdir, its own or a new one, skip all batches to come that have these stretches.

        Returns:
            the batches that it did not skip before.

        Raises:
            UserError: the newest checkpoint has them already, or the workdir cannot be written.
        """
        own = self.workdir is not None and workdir.absolute() == self.workdir.absolute()
        with _writing(workdir):
            if not own and (workdir / "config.json").exists():
                raise UserError("--skip", f"{workdir} has another run", "give this run's workdir, or a new one")
            workdir.mkdir(parents=True, exist_ok=True)
        saved = max(verify.steps(workdir / "checkpoints"), default=0)
        with locked(workdir, 0) as other:
            if other:
                raise UserError("--skip", f"another process is using {workdir} ({other})",
                                "stop the run, then run this again")
            before = self.skipped if own else SkippedBatches()
            record = self.skipped if own else SkippedBatches(self.skipped.batches)  # a new run, without what this skips
            while more := self._skipping(record)._having(stretches):
                if (first := min(more)) < record.reach(saved):
                    raise UserError("--skip", f"checkpoint {saved} has it, from batch {first} on", self._go_back(first))
                record = dataclasses.replace(record, batches=tuple(sorted({*record.batches, *more})))
                if len(record.batches) > MOST * max(1, self.steps):
                    raise UserError("--skip", "nearly every batch has it", "prepare the corpus again without it")
            if record != before:
                with _writing(workdir):
                    record.write(workdir)
        return tuple(sorted({*record.batches} - {*before.batches}))

    def _skipping(self, record: SkippedBatches) -> "TracedRun":
        return dataclasses.replace(self, skipped=record)

    def _having(self, stretches: Sequence[Stretch]) -> set[int]:
        """Return the batches with these stretches that it does not skip; skipping them makes room for further ones."""
        return {one.batch for some in self.seen(stretches) for one in some if one.counts}

    def _go_back(self, batch: int) -> str:
        before = max((step for step in self.checkpoints if self.skipped.reach(step) <= batch), default=None)
        return ("give a new workdir, to train in again from the start" if before is None else
                f"first go back: jaxtrain checkpoint restore-to {self.workdir} {before}")


@contextlib.contextmanager
def _writing(workdir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError("--skip", f"{workdir} cannot be written ({error.strerror or error})",
                        "give this run's workdir, or a new one") from None


def open_traced(where: str, overrides: JsonObject | None = None, done: int | None = None) -> TracedRun:
    """Open the run in a workdir, the run that a config describes, or a corpus alone.

    `done`: how many of the steps are done; None: as many as metrics.jsonl has, or after `restore-to` the checkpoint.
    """
    if (Path(where) / "config.json").is_file():
        return _recorded(Path(where), overrides or {}, done)
    if where.startswith("hf:") or where.partition(".py:")[0].endswith((".py", ".json")) or ".py:" in where or (
            is_named(where) and not Path(where).exists()):
        return _planned(load_config(where, overrides))
    if overrides:
        raise UserError(f"--config.{next(iter(overrides))}", f"{where} is a corpus, which has no config",
                        "trace CONFIG with --config.data.source=CORPUS")
    if not is_corpus(where) and not Path(where).exists():
        raise UserError("CORPUS_OR_RUN", f"{where} does not exist", "give a workdir, a config or a corpus")
    data, manifest = DataConfig(source=where), Path(where, "manifest.json")
    if (user_json(manifest, dict, "CORPUS_OR_RUN", "prepare the corpus again", LARGE) or {}).get("format") == SEQUENCES:
        return TracedRun(as_documents(open_sequences(where, cache_root(data))), data, text=False)
    return TracedRun(load_corpus(data), data)


def _planned(config: Config) -> TracedRun:
    """Return a run that has not begun."""
    refuse(config, {})
    corpus = configured_corpus(config.model, config.data)
    batches = configured_batches(config.model, config.data, config.diloco, corpus, {})  # arrays do not decide the order
    steps = config.train.steps or steps_in(batches, config.train.epochs)
    documents = corpus if isinstance(corpus, Corpus) else as_documents(corpus)
    return TracedRun(documents, config.data, batches, steps, init_from=config.train.init_from,
                     text=isinstance(corpus, Corpus))


def _recorded(workdir: Path, overrides: JsonObject, done: int | None) -> TracedRun:
    run = RecordedRun(workdir, TAIL)
    config, own_parts = load_config(workdir / "config.json", overrides), run.run.get("own_parts") or {}
    if overrides:
        before = load_config(workdir / "config.json").to_dict()
        try:
            changes_of(workdir, before, config.to_dict(), config, 0, (), "optimizer" in own_parts)
        except OtherRun as error:
            raise UserError("CORPUS_OR_RUN", error.reason, "leave that key out, or trace a config in place of the "
                            "workdir") from None
    refuse(config, own_parts)
    planned = _planned(config)
    then = run.run.get("data_manifests") or {}
    if changed := [name for name, now in planned.corpus.manifests.items() if then.get(name, now) != now]:
        raise UserError(f"data.mixture.{changed[0]}" if changed[0] else "data.source",
                        f"{workdir} was trained on another version of it", "bring that one back")
    directory = workdir / "checkpoints"
    good = tuple(step for step in verify.steps(directory) if verify.good(directory, step) is not None)
    if done is None:
        done = max([0 if turned_back(workdir) else run.step, *good])
    return dataclasses.replace(planned, workdir=workdir, checkpoints=good, steps=max(planned.steps, done), done=done,
                               skipped=SkippedBatches.read(workdir) or SkippedBatches(),
                               unused=unused_checkpoints(directory))


def refuse(config: Config, own_parts: JsonMapping) -> None:
    """Refuse a run whose batches do not follow from a corpus, by the name of what they follow from."""
    if config.rl.prompts:
        raise UserError("rl.prompts", "batches are made of the answers of the model as it trains, and cannot be "
                        "inverted", "search WORKDIR/rollouts/STEP.jsonl, which has them")
    if "data" in own_parts:
        raise UserError("data", "the run trained on batches given by data=, which are not made from a corpus",
                        "look for the document where they are made")
