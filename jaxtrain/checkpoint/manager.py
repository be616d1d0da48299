"""The checkpoint manager: saves and restores a pytree on any mesh through Orbax, and verifies what it wrote.

On disk a checkpoint is `directory/STEP/` with a flat mapping from paths such as `params/layers/query` to arrays, a JSON
`meta`, and the fingerprint that the arrays had on the devices. Tree structure (dataclasses, optax's tuples, None) is
not stored: it comes from the state that is restored. After a checkpoint is committed a thread reads it back and, if it
holds what was saved, marks it good (`verify.py`). Only good checkpoints allow older ones to be deleted, and only good
ones are restored. A damaged one is renamed to `STEP.damaged`: never chosen again, but not lost.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import jax

from jaxtrain.base import arguments
from jaxtrain.base.annotations import JsonObject, PyTree
from jaxtrain.checkpoint import fingerprint, full_disk, step_folders, verify
from jaxtrain.checkpoint.orbax.async_saver import AsyncSaver
from jaxtrain.checkpoint.orbax.orbax_logging import innermost, orbax
from jaxtrain.checkpoint.restore import Damaged, Extras, load, unreadable
from jaxtrain.checkpoint.retention import Retention
from jaxtrain.checkpoint.shared_verification import Checks
from jaxtrain.checkpoint.trees import describe, flatten
from jaxtrain.distributed import exit_codes
from jaxtrain.distributed.coordination import exchange, together
from jaxtrain.errors import UserError
from jaxtrain.observe.events import tell

if TYPE_CHECKING:
    from jaxtrain.checkpoint.mirror import Mirror

AGAIN_S = (1, 2, 4, 8, 16, 32, *[60] * 8)  # seconds between retries of the last save of a run
_PATIENCE_S = 20.0  # how long `close` waits for a checkpoint being verified; otherwise the next start verifies it
_names = map("checkpoint/{}".format, itertools.count())  # names of exchanges; all processes make the same calls


class NotSaved(exit_codes.RunExit):
    """Raised when the newest save is not on disk; the next start repeats the work done since the save before."""

    def __init__(self, step: int, directory: Path, reason: str, *, alone: bool = False):
        before = max((saved for saved in verify.steps(directory) if saved < step), default=None)
        again = "begins again at step 0" if before is None else f"resumes from step {before}"
        super().__init__(exit_codes.RESTART, f"checkpoint: step {step} could not be saved in {directory} ({reason}); "
                         f"free space or repair the storage, and run the same command again: it {again}")
        self.alone = alone


class CheckpointManager:
    """The checkpoints of one run; in a multi-process run every process makes all calls, at the same steps."""

    def __init__(self, directory: str | Path, keep: int = 2, *, keep_every: int = 0, best: str = "",
                 verify: str = "full", mirror: str = "", extras: Extras = MappingProxyType({})):
        """Set up the manager without touching the disk; `directory` is created and cleaned up at the first save.

        Args:
            keep: how many of the last good checkpoints are kept.
            keep_every: checkpoints whose step is a multiple of this are kept forever; 0: none.
            best: a metric in the metrics.jsonl next to `directory`; the checkpoint with the lowest value is kept too;
                "": none.
            verify: what is checked before a good one is loaded: "full", the sha256 of its files, or their "sizes".
            mirror: a path or URL to which each good checkpoint is copied, and from which it is fetched if lost; "":
                none.
            extras: for each entry of the state's `extras`, a function that makes its value for checkpoints that lack
                it.
        """
        arguments.is_path("directory", directory, "give the folder of checkpoints")
        self._extras = extras
        self._directory = Path(directory).absolute()
        if found := set(str(self._directory)) & set("[]\\"):
            raise UserError("--workdir", f"Orbax cannot restore checkpoints in {self._directory}, because of "
                            f"the {' and '.join(sorted(found))} in it", "give a folder without these characters")
        self._retention = Retention(self._directory, keep, keep_every, best)
        self._saver = AsyncSaver()
        self._checks = Checks(self._directory, hashes=verify == "full")
        self.on_good: list[Callable[[int, Path], None]] = []  # called in the background with each new good checkpoint
        self._mirror: Mirror | None = None
        if mirror:
            from jaxtrain.checkpoint import mirror as mirrors

            self._mirror = mirrors.Mirror(directory, mirror, self._retention.keeping)
        if self._mirror and jax.process_index() == 0:
            self.on_good.append(self._mirror.copy)
        self._jobs: list[_Job] = []
        self._checked: int | None = None  # the step that `newest` has just found good
        self._passed_over: set[int] = set()  # damaged steps that could not be renamed
        self._failure: NotSaved | None = None  # why the newest save is not on disk

    def latest(self) -> int | None:
        """Return the newest committed step, good or not."""
        return max(verify.steps(self._directory), default=None)

    def steps(self) -> list[int]:
        """Return all committed steps, good or not, in order."""
        return verify.steps(self._directory)

    def discard(self, above: int) -> None:
        """Set checkpoints after step `above` aside; called by one process, before anything is saved or restored.

        They are deleted once the run has a good one beyond them.
        """
        for step in self.steps():
            if step > above:
                step_folders.rename(self._directory / str(step), step_folders.ABANDONED)
        if self._mirror:  # otherwise they would be fetched back if the local ones were lost
            try:
                self._mirror.hide(above)
            except UserError as error:  # the next copy removes them
                self._tell("mirror_failed", f"copies of steps beyond {above} still count in the mirror ({error})",
                           step=above, reason=str(error))

    def newest(self, below: int | None = None) -> int | None:
        """Return the newest good step (below `below`); verifies its files, and reports and skips damaged checkpoints.

        A checkpoint that was committed but not read back yet is read back now. Returns None if there is none (below
        that step).

        Raises:
            UserError: there are checkpoints, but none is good. Starting over is left for the user to decide.
        """
        self._checked = None
        candidates = exchange(verify.steps(self._directory), lambda found: found[0])
        for step in reversed(candidates):
            if step not in self._passed_over and (below is None or step < below):
                if problems := self._checks.of(step, next(_names)):
                    self._set_aside(step, problems)
                if not problems or self._fetched(step):
                    self._checked = step
                    return step
        if below is None and (fetched := self._fetched(None)):
            self._checked = fetched
            return fetched
        set_aside = sorted(path.name for path in self._directory.glob(f"*{step_folders.DAMAGED}*"))
        if below is None and (damaged := exchange(set_aside, lambda found: found[0])):
            raise UserError("checkpoint", f"none of the checkpoints in {self._directory} is good ({', '.join(damaged)};"
                            " events.jsonl says why)", "restore a good copy, or move them away to start at step 0")
        return None

    def _fetched(self, step: int | None) -> int | None:
        """Fetch this step, or the newest, from the mirror; returns None if it has none."""
        if (mirror := self._mirror) is None:
            return None

        def fetch(_):
            try:
                return mirror.fetch(step)
            except (UserError, OSError) as error:
                if step is None:  # there is nothing else to fall back on
                    raise
                reason = f"{error.key}: {error.reason}" if isinstance(error, UserError) else innermost(error)
                self._tell("mirror_failed", f"checkpoint {step} cannot be fetched ({reason}); an older one is looked "
                           "for", step=step, reason=reason)
                return None

        return exchange(None, fetch)

    def restore_newest(self, abstract_state: PyTree, below: int | None = None) -> tuple[int, PyTree, JsonObject] | None:
        """Return (step, state, meta) of the newest good checkpoint that loads as it was saved, or None.

        Args:
            below: roll back to before that step. Checkpoints from there on are renamed to `STEP.abandoned`, and deleted
                once the run has a good one beyond them.

        Raises:
            UserError: the state's structure differs from this run's, or no checkpoint is good.
        """
        for job in self._jobs:  # one being verified now may be the newest good one
            job.thread.join()
        if jax.process_index() == 0:
            step_folders.delete_rest(self._directory)  # there may be no save any more, which would do it
        while True:
            checked, self._checked = self._checked, None
            step = checked if checked is not None and below is None else self.newest(below)
            self._checked = None
            if step is None:
                return None
            try:
                state, meta = load(self._directory / str(step), abstract_state, self._extras), self.meta(step)
            except Damaged as damage:
                self._set_aside(step, [str(damage)])
                continue
            if below is not None:
                exchange(None, lambda _: [
                    step_folders.rename(self._directory / str(other), step_folders.ABANDONED)
                    for other in verify.steps(self._directory) if other >= below])
            if self._mirror and jax.process_index() == 0:
                self._mirror.copy(step)  # unless it is copied already; a run may have ended while copying it
            return step, state, meta

    def prepare(self, state: PyTree) -> None:
        """Import and compile what the first save would otherwise wait for, while the device computes this state."""
        if jax.default_backend() == "cpu":  # the device is this processor: after it
            jax.block_until_ready(state)
        orbax()
        fingerprint.on_device(flatten(state))

    def save(self, step: int, state: PyTree, meta: JsonObject | None = None) -> float:
        """Copy `state` off the devices and write it in the background; a step that exists is left as it is.

        The state may be donated at once. Waits if the previous save is still being written, or the one before it is
        still being read back. A failed save is reported and recorded, and the run goes on; `wait` and `close` raise if
        the last one failed.

        Returns:
            the seconds for which the caller was blocked.
        """
        began = time.perf_counter()
        self._wait_for_commits()
        for job in self._jobs if self._failure else self._jobs[:-1]:  # a failed save still frees space
            job.thread.join()
        self._jobs = self._jobs[-1:]
        flat = flatten(state)
        if self._may_be_saved(step, flat) and (job := self._start(step, flat, meta or {})):
            job.blocked_s = time.perf_counter() - began
            job.thread.start()
        return time.perf_counter() - began

    def restore(self, step: int, abstract_state: PyTree) -> PyTree:
        """Return the state at `step`, as `abstract_state` (a pytree of `jax.ShapeDtypeStruct`) describes and shards it.

        Raises:
            UserError: names the first path whose shape or dtype differs in the checkpoint (Orbax would cast it
                silently), or says that the files cannot be read or do not hold what was saved.
        """
        try:
            return load(self._directory / str(step), abstract_state, self._extras)
        except Damaged as damage:
            raise unreadable(self._directory / str(step), str(damage)) from None

    def meta(self, step: int) -> JsonObject:
        """Return the metadata saved with the state at `step`."""
        try:
            return verify.saved_meta(self._directory / str(step))
        except (OSError, ValueError) as error:
            raise unreadable(self._directory / str(step), innermost(error)) from None

    def failed(self) -> bool:
        """Return whether the last save failed."""
        return self._failure is not None

    def writing(self) -> bool:
        """Return whether the last save is still being written."""
        return any(not job.committed.is_set() for job in self._jobs)

    def wait(self) -> None:
        """Wait until all saves are on disk, verified and mirrored; raises if the last one is not on disk."""
        for job in self._jobs:
            job.thread.join()
        if self._mirror:
            self._mirror.wait()
        self._raise()

    def insist(self, step: int, state: PyTree, meta: JsonObject | None, pause: Callable[[float], bool]) -> None:
        """Wait for the last save of a run and retry it while it fails, since the state exists nowhere else.

        Args:
            pause: waits so many seconds; returns False, in all processes alike, if there is time for only one more try.

        Raises:
            NotSaved: no attempt succeeded.
        """
        for seconds in AGAIN_S:
            try:
                return self.wait()
            except NotSaved:
                self._tell("checkpoint_again", f"the last step is in memory only; saving it again in {seconds} s",
                           step=step)
                more = pause(seconds)
                self.save(step, state, meta)
                if not more:
                    break
        self.wait()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            self.close()
        except NotSaved:
            if error is None:  # otherwise do not hide the original error, which may cause a rollback
                raise

    def close(self) -> None:
        """Wait until all saves are on disk, and release Orbax's threads; raises if the last one failed.

        Verification gets a few seconds more; then it is left to the next start.
        """
        self._wait_for_commits()
        for patience in (_PATIENCE_S, _PATIENCE_S):
            for job in self._jobs:
                job.thread.join(patience)
            self._checks.stopping = True
        if self._mirror:
            self._mirror.close()
        self._saver.close()
        self._raise()

    # ------------------------------------------------------------------------------------------------------- the save

    def _may_be_saved(self, step: int, flat: dict[str, jax.Array]) -> bool:
        """Prepare the directory for a step; False if it cannot be saved, or exists already."""
        wanted, first = sum(leaf.nbytes for leaf in flat.values()), not (self._jobs or self._failure)
        refused = exchange(None, lambda _: step_folders.prepare(self._directory, step, wanted, first=first,
                                                                tell=self._tell))
        if refused:
            self._failed(step, wanted, OSError(refused))
            self._make_room(step)
        if refused == "" and exchange(self.failed(), any) and not self._checks.of(step, next(_names)):
            self._failure = None  # the save had succeeded after all
        return refused is None

    def _start(self, step: int, flat: dict[str, jax.Array], meta: JsonObject) -> "_Job | None":
        """Copy the state off the devices and begin to write it; None if that failed."""
        # Orbax would wait for it too, but programs started before it is ready may interfere with its collectives.
        jax.block_until_ready(flat)
        parts, name = fingerprint.on_device(flat), next(_names)
        shapes = {path: describe(leaf) for path, leaf in flat.items()}  # the arrays themselves may be donated soon
        size = sum(leaf.nbytes for leaf in flat.values())

        def sums():
            found = fingerprint.total(self._saver.barrier.gathered())
            return {"step": step, "arrays": {path: [what, found.get(path)] for path, what in shapes.items()}}

        self._saver.barrier.begin(name, lambda: fingerprint.read(parts))
        try:
            self._saver.save(self._directory / str(step), flat, meta, sums)
        except (OSError, ValueError) as error:  # raised by storage; bugs in jaxtrain raise other kinds
            if jax.process_count() > 1:  # the others may be in the middle of it: restart all rather than wait
                why = full_disk.why_not_written(self._directory, step, size, innermost(error))
                raise NotSaved(step, self._directory, why, alone=True) from None
            self._saver.drain()
            self._failed(step, size, error)
            self._make_room(step)
            return None
        job = _Job(step, name, size)
        job.thread = threading.Thread(target=self._finish, args=(job,), name="checkpoint", daemon=True)
        self._jobs.append(job)
        return job

    def _finish(self, job: "_Job") -> None:
        """Finish a save on its own thread; no failure here ends the run."""
        began = time.perf_counter()
        try:
            failure = None
            try:
                self._saver.wait()
            except Exception as error:
                failure = error
                with contextlib.suppress(Exception):  # the coordinator is lost, and soon all processes are
                    self._saver.barrier.fail(innermost(error))
                self._saver.drain()
                self._failed(job.step, job.size, error)
            else:
                self._failure = None
            finally:
                job.committed.set()
            failures = together(f"{job.name}/saved", failure and innermost(failure), list)
            if any(failures):
                if not failure:
                    self._failed(job.step, job.size, OSError(next(filter(None, failures))))
                self._make_room(job.step)
                return
            committed = time.perf_counter()
            problems = self._checks.read_back(job.step, job.name)
            if problems:
                self._set_aside(job.step, problems, f"{job.name}/damaged")
                if job is self._jobs[-1]:
                    self._failure = NotSaved(job.step, self._directory, problems[0])
                return
            self._tell("checkpoint", "", step=job.step, blocked_s=job.blocked_s, written_s=committed - began,
                       verified_s=time.perf_counter() - committed, bytes=job.size)
        except Exception as error:
            self._tell("checkpoint_unverified", f"checkpoint {job.step} could not be read back "
                       f"({innermost(error)}); the next start does it", step=job.step, reason=innermost(error))
            return
        try:
            for callback in self.on_good:
                callback(job.step, self._directory / str(job.step))
            self._delete_old()
        except Exception as error:
            self._tell("checkpoint_aftermath", f"checkpoint {job.step} is good, but what follows failed "
                       f"({innermost(error)}); the next one tries again", step=job.step, reason=innermost(error))

    def _failed(self, step: int, wanted: int, error: Exception) -> None:
        """Report and record a failed save of so many bytes."""
        reason = full_disk.why_not_written(self._directory, step, wanted, innermost(error))
        self._failure = NotSaved(step, self._directory, reason)
        self._tell("checkpoint_failed", f"checkpoint {step} could not be saved ({reason}); the next save tries "
                   "again", step=step, reason=reason)

    def _make_room(self, step: int) -> None:
        """Delete what a failed save left once nothing writes it any more, and other checkpoints that may go."""
        with contextlib.suppress(OSError):
            if jax.process_index() == 0:
                step_folders.delete_unfinished(self._directory, step)
            self._delete_old()

    def _delete_old(self) -> None:
        if jax.process_index() == 0:
            self._retention.delete(lambda: {job.step for job in self._jobs},
                                   lambda: self._mirror.pinned if self._mirror else ())

    # ------------------------------------------------------------------------------------------------ what is damaged

    def _set_aside(self, step: int, problems: list[str], name: str | None = None) -> None:
        """Report a damaged checkpoint and rename it so that it is never chosen again."""
        folder = self._directory / str(step)

        def put_aside(_):
            try:
                return str(step_folders.rename(folder, step_folders.DAMAGED))
            except OSError:  # a read-only folder is checked again next time
                return str(folder)

        aside = together(name or next(_names), None, put_aside)
        if aside == str(folder):
            self._passed_over.add(step)
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        self._tell("checkpoint_damaged", f"checkpoint {step} is damaged ({problems[0]}{more}); kept as {aside}",
                   step=step, problems=problems, kept_as=aside)

    def _wait_for_commits(self) -> None:
        for job in self._jobs:
            job.committed.wait()

    def _raise(self) -> None:
        if self._failure:
            raise self._failure

    def _tell(self, kind: str, sentence: str, **fields: object) -> None:
        if jax.process_index() == 0:
            tell(self._directory.parent, kind, sentence, **fields)


class _Job:
    """A save in progress."""

    def __init__(self, step: int, name: str, size: int):
        self.step, self.name, self.size, self.blocked_s = step, name, size, 0.0
        self.committed = threading.Event()
        self.thread = threading.Thread()
