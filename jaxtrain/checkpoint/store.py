"""Checkpoints of a pytree on any mesh: a layer over Orbax that checks what it wrote, and again before it loads.

On disk a checkpoint is `directory/STEP/` with a flat mapping from paths such as `params/layers/query` to arrays, a JSON
`meta`, and the fingerprint that the arrays had on the devices. Tree structure (dataclasses, optax's tuples, None) is
not stored: it comes from the state that is restored. After a checkpoint is committed a thread reads it back and, if it
holds what was saved, makes it good (`verify.py`); only good ones let older ones go, and only good ones are chosen.
What is damaged is renamed to `STEP.damaged`: never chosen again, and not lost.
"""

import contextlib
import errno
import functools
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxtrain import distributed
from jaxtrain.checkpoint import fingerprint, verify
from jaxtrain.checkpoint.mirror import FETCHING, Mirror
from jaxtrain.checkpoint.quiet import innermost, no_echoes, orbax
from jaxtrain.checkpoint.retention import best_of, dispensable
from jaxtrain.checkpoint.trees import describe, flatten, zeros_like
from jaxtrain.errors import UserError, say
from jaxtrain.exchange import together
from jaxtrain.observe.events import record
from jaxtrain.resilience import exits

AGAIN_S = (1, 2, 4, 8, 16, 32, *[60] * 8)  # seconds until the last save of a run is tried again
_PATIENCE_S = 20.0  # what `close` waits for a checkpoint that is being read back; the next start does it otherwise
YOUNG = ("history/",)  # parts of the state that older checkpoints lack: they start from zeros
_calls = itertools.count()  # numbers what processes agree on; all make the same calls
_DAMAGED, _ABANDONED, _DELETED, _TEMPORARY = ".damaged", ".abandoned", ".deleted", ".orbax-checkpoint-tmp"


class Damaged(Exception):
    """A checkpoint does not hold what was saved."""


class NotSaved(exits.Ended):
    """The newest save is not on disk: what was done since the one before is done again by the next start."""

    def __init__(self, step: int, directory: Path, reason: str):
        super().__init__(exits.RESTART, f"checkpoint: step {step} could not be saved in {directory} ({reason}); make "
                         "room or mend the storage, and run the same command again")


class Checkpoints:
    """The checkpoints of one run. In a multi-process run every process makes all calls, at the same steps."""

    def __init__(self, directory: str | Path, keep: int = 2, *, keep_every: int = 0, best: str = "",
                 verify: str = "full", mirror: str = ""):
        """Costs nothing: `directory` is made, and left-overs in it are cleaned up, when it is first written.

        Args:
            keep: how many of the last good ones are kept.
            keep_every: those of every so many steps are kept for ever; 0: none.
            best: a metric of metrics.jsonl, beside `directory`, by which the lowest is kept too; "": none.
            verify: what is checked before a good one is loaded: "full", the sha256 of its files, or their "sizes".
            mirror: a path or URL where each good one is copied to, and fetched from when it is lost here; "": none.
        """
        self._directory = Path(directory).absolute()
        self._keep, self._keep_every, self._best, self._hashes = keep, keep_every, best, verify == "full"
        self.on_good: list[Callable[[int, Path], None]] = []  # called in the background with each new good checkpoint
        self._mirror = Mirror(directory, mirror, self.keeping) if mirror else None
        if self._mirror and jax.process_index() == 0:
            self.on_good.append(self._mirror.copy)
        self._jobs: list[_Job] = []
        self._checked: int | None = None  # what `newest` has just found good
        self._passed_over: set[int] = set()  # what is damaged and could not be renamed
        self._failure: NotSaved | None = None  # why the newest save is not on disk
        self._stopping = False
        self._retaining = threading.Lock()

    def latest(self) -> int | None:
        """The newest committed step, good or not."""
        return max(verify.steps(self._directory), default=None)

    def steps(self) -> list[int]:
        """All committed steps, good or not, in order."""
        return verify.steps(self._directory)

    def discard(self, above: int) -> None:
        """Set the checkpoints of more than `above` steps aside: by one process, before anything is saved or restored.

        They are deleted once the run has a good one beyond them.
        """
        for step in self.steps():
            if step > above:
                _rename(self._directory / str(step), _ABANDONED)
        if self._mirror:  # or they would come back from there, should those here be lost
            try:
                self._mirror.hide(above)
            except UserError as error:  # the next copy takes them away
                self._tell("mirror_failed", f"copies of steps beyond {above} still count in the mirror ({error})",
                           step=above, reason=str(error))

    def newest(self, below: int | None = None) -> int | None:
        """The newest good step (below one); checks its files, and passes over what is damaged, naming it.

        A checkpoint that was committed but not read back yet is read back now. None: there is none (below that step).

        Raises:
            UserError: there are checkpoints, but none is good. To begin again is for a person to decide.
        """
        self._checked = None
        candidates = self._agree(verify.steps(self._directory), lambda found: found[0])
        for step in reversed(candidates):
            if step not in self._passed_over and (below is None or step < below):
                problems = self._check(step)
                if not problems:
                    return self._found(step)
                self._pass_over(step, problems)
                if self._fetched(step):
                    return self._found(step)
        if below is None and (fetched := self._fetched(None)):
            return self._found(fetched)
        if below is None and (damaged := self._agree(self._set_aside(), lambda found: found[0])):
            raise UserError("checkpoint", f"of the checkpoints in {self._directory} none is good ({', '.join(damaged)};"
                            " events.jsonl says why)", "bring a good copy back, or move them away to begin at step 0")
        return None

    def _found(self, step: int) -> int:
        self._checked = step
        if self._mirror and jax.process_index() == 0:
            self._mirror.copy(step)  # unless it is there, as after a run that ended in the middle of copying it
        return step

    def _fetched(self, step: int | None) -> int | None:
        """From the mirror: this step, or its newest; None if it has none."""
        if (mirror := self._mirror) is None:
            return None

        def fetch(_):
            try:
                return mirror.fetch(step)
            except (UserError, OSError) as error:
                if step is None:  # there is nothing else
                    raise
                reason = f"{error.key}: {error.reason}" if isinstance(error, UserError) else innermost(error)
                self._tell("mirror_failed", f"checkpoint {step} cannot be fetched ({reason}); an older one is looked "
                           "for", step=step, reason=reason)
                return None

        return self._agree(None, fetch)

    def restore_newest(self, abstract_state: Any, below: int | None = None) -> tuple[int, Any, dict[str, Any]] | None:
        """-> (step, state, meta) of the newest good checkpoint that loads as it was saved; None: there is none.

        `below`: go back to before that step. Checkpoints from there on belong to a past that is given up: they are
        renamed to `STEP.abandoned`, and deleted once the run has a good one beyond them.

        Raises:
            UserError: the state is another one than this run's, or no checkpoint is good.
        """
        for job in self._jobs:  # what is being read back now may be the newest good one
            job.thread.join()
        while True:
            checked, self._checked = self._checked, None
            step = checked if checked is not None and below is None else self.newest(below)
            self._checked = None
            if step is None:
                return None
            try:
                state, meta = self._load(step, abstract_state), self.meta(step)
            except Damaged as damage:
                self._pass_over(step, [str(damage)])
                continue
            if below is not None:
                self._agree(None, lambda _: [_rename(self._directory / str(other), _ABANDONED)
                                             for other in verify.steps(self._directory) if other >= below])
            return step, state, meta

    def prepare(self, state: Any) -> None:
        """Load and compile, before the loop, what the first save would otherwise wait for."""
        orbax()
        fingerprint.on_device(flatten(state))

    def save(self, step: int, state: Any, meta: dict[str, Any] | None = None) -> float:
        """Copy `state` off the devices and write it in the background; a step that exists is left as it is.

        The state may be donated at once. Waits if the save before is still being written, or the one before that still
        being read back. A save that fails is told and recorded, and the run goes on; `wait` and `close` raise if the
        last one did.

        Returns:
            the seconds for which the caller was held up.
        """
        began = time.perf_counter()
        self._wait_for_commits()
        for job in self._jobs[:-1]:
            job.thread.join()
        self._jobs = self._jobs[-1:]
        ocp, flat, folder = orbax(), flatten(state), self._directory / str(step)
        refused = self._agree(None, lambda _: self._preparation(folder, flat))
        if refused:
            self._failed(step, OSError(errno.ENOSPC, refused))
        if refused is not None:
            return time.perf_counter() - began
        from jaxtrain.checkpoint.late import LateJsonSave

        # Orbax would wait for it too; but what is started before it is there may get in the way of its collectives.
        jax.block_until_ready(flat)
        parts, name = fingerprint.on_device(flat), f"checkpoint/{next(_calls)}"
        shapes = {path: describe(leaf) for path, leaf in flat.items()}  # the arrays themselves may be donated soon

        def sums():
            found = {}  # in process 0: the others need no answer, and it would stay with the coordinator for ever
            together(f"{name}/sums", fingerprint.read(parts), lambda shares: found.update(fingerprint.total(shares)))
            return {"step": step, "arrays": {path: [what, found.get(path)] for path, what in shapes.items()}}

        try:
            self._saver.save(folder, args=ocp.args.Composite(
                state=ocp.args.StandardSave(flat), meta=ocp.args.JsonSave(meta or {}), fingerprint=LateJsonSave(sums)))
        except (OSError, ValueError) as error:  # what a storage says; mistakes of ours are other kinds
            if jax.process_count() > 1:  # the others may be in the middle of it: all start again, rather than wait
                raise OSError(f"checkpoint {step} could not be saved ({innermost(error)})") from error
            self._drain()
            self._failed(step, error)
            return time.perf_counter() - began
        job = _Job(step, name)
        # Process 0 writes the sums with its commit; the others bring theirs.
        tell = sums if jax.process_index() else lambda: None
        job.thread = threading.Thread(target=self._finish, args=(job, tell), name="checkpoint", daemon=True)
        self._jobs.append(job)
        job.blocked_s = time.perf_counter() - began
        job.thread.start()
        return job.blocked_s

    def restore(self, step: int, abstract_state: Any) -> Any:
        """The state at `step`, as `abstract_state` (a pytree of `jax.ShapeDtypeStruct`) describes and shards it.

        Raises:
            UserError: names the first path whose shape or dtype is another in the checkpoint (Orbax would cast it in
                silence), or says that the files cannot be read or do not hold what was saved.
        """
        try:
            return self._load(step, abstract_state)
        except Damaged as damage:
            raise self._unreadable(step, str(damage)) from None

    def meta(self, step: int) -> dict[str, Any]:
        """What was saved beside the state at `step`."""
        try:
            return verify.read_json(self._directory / str(step) / "meta" / "metadata")
        except (OSError, ValueError) as error:
            raise self._unreadable(step, innermost(error)) from None

    def failed(self) -> bool:
        """Whether what was saved last did not come to be."""
        return self._failure is not None

    def writing(self) -> bool:
        """Whether what was saved last is still on its way to disk."""
        return any(not job.committed.is_set() for job in self._jobs)

    def wait(self) -> None:
        """Return when everything saved so far is on disk, read back and mirrored; raises if the last is not on disk."""
        for job in self._jobs:
            job.thread.join()
        if self._mirror:
            self._mirror.wait()
        self._raise()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            self.close()
        except NotSaved:
            if error is None:  # else that is what is to be seen, or to go back for
                raise

    def close(self) -> None:
        """Return when everything saved so far is on disk, and release Orbax's threads; raises if the last failed.

        Reading back gets some seconds more; then it is left to the next start.
        """
        self._wait_for_commits()
        for patience in (_PATIENCE_S, _PATIENCE_S):
            for job in self._jobs:
                job.thread.join(patience)
            self._stopping = True
        if self._mirror:
            self._mirror.close()
        if "_saver" in self.__dict__:
            self._saver.close()
        self._raise()

    # ------------------------------------------------------------------------------------------------------- the save

    @functools.cached_property
    def _saver(self):
        from jaxtrain.checkpoint.late import LateJson

        ocp = orbax()
        return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(
            state=ocp.StandardCheckpointHandler(), meta=ocp.JsonCheckpointHandler(), fingerprint=LateJson()))

    def _preparation(self, folder: Path, flat: dict[str, Any]) -> str | None:
        """Make the directory clean -> None; or why nothing is to be saved: "" if it is there already."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if folder.exists():
                return ""
            for entry in self._directory.iterdir():
                if _TEMPORARY in entry.name or entry.name.endswith((_DELETED, FETCHING)):
                    shutil.rmtree(entry, ignore_errors=True)
            free, wanted = shutil.disk_usage(self._directory).free, sum(leaf.nbytes for leaf in flat.values())
        except OSError as error:
            raise UserError("--workdir", f"{self._directory} cannot be written ({error.strerror})",
                            "give a folder that can be") from None
        # Compression saves a little. Better not to begin what cannot end: one process that fails holds up the others.
        return f"{free:,} bytes are free, of {wanted:,}" if free < 0.8 * wanted else None

    def _finish(self, job: "_Job", tell: Callable[[], Any]) -> None:
        """What remains of a save, on a thread of its own: nothing that goes wrong here ends the run."""
        began = time.perf_counter()
        try:
            failure = None
            try:
                tell()
                with no_echoes():
                    self._saver.wait_until_finished()
            except Exception as error:
                failure = error
                self._drain()
            finally:
                self._commit(job, failure)
            failures = together(f"{job.name}/saved", failure and innermost(failure), list)
            if any(failures):
                if not failure:
                    self._failed(job.step, OSError(next(filter(None, failures))))
                return
            committed = time.perf_counter()
            problems = self._read_back(job.step, job.name)
            if problems:
                self._pass_over(job.step, problems, f"{job.name}/damaged")
                return
            self._tell("checkpoint", None, step=job.step, blocked_s=job.blocked_s, written_s=committed - began,
                       verified_s=time.perf_counter() - committed)
        except Exception as error:
            self._tell("checkpoint_unverified", f"checkpoint {job.step} could not be read back "
                       f"({innermost(error)}); the next start does it", step=job.step, reason=innermost(error))
            return
        try:
            for callback in self.on_good:
                callback(job.step, self._directory / str(job.step))
            if jax.process_index() == 0:
                self._retain()
        except Exception as error:
            self._tell("checkpoint_aftermath", f"checkpoint {job.step} is good, but what follows failed "
                       f"({innermost(error)}); the next one tries again", step=job.step, reason=innermost(error))

    def _drain(self) -> None:
        """Orbax holds more than one error of a save that fails, and would raise the next one at the next save."""
        for _ in range(9):
            with contextlib.suppress(Exception):
                self._saver.wait_until_finished()
                return

    def _commit(self, job: "_Job", failure: Exception | None) -> None:
        try:
            if failure:
                self._failed(job.step, failure)
            else:
                self._failure = None
        finally:
            job.committed.set()

    def _failed(self, step: int, error: Exception) -> None:
        reason = innermost(error)
        self._failure = NotSaved(step, self._directory, reason)
        self._tell("checkpoint_failed", f"checkpoint {step} could not be saved ({reason}); the run goes on, and the "
                   "next save tries again", step=step, reason=reason)
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                for entry in self._directory.glob(f"{step}{_TEMPORARY}*"):
                    shutil.rmtree(entry, ignore_errors=True)
                self._retain()  # what may go makes room

    def keeping(self, good: list[int]) -> list[int]:
        """Which of these steps stay, wherever they are."""
        gone = dispensable(good, [], keep=self._keep, keep_every=self._keep_every, best=self._best_of(good))
        return [step for step in good if step not in gone]

    def _best_of(self, good: list[int]) -> int | None:
        if self._best:
            with contextlib.suppress(OSError, ValueError):
                return best_of(good, self._directory.parent / "metrics.jsonl", self._best)
        return None

    def _retain(self) -> None:
        """Delete what may go. A folder is renamed first, so that half of one is never taken for a checkpoint."""
        with self._retaining:  # a save that fails makes room while the one before is being finished
            steps = verify.steps(self._directory)
            good = [step for step in steps if verify.good(self._directory, step)]
            under_way = {job.step for job in self._jobs}
            others = [step for step in steps if step not in good and step not in under_way]
            gone = dispensable(good, others, keep=self._keep, keep_every=self._keep_every, best=self._best_of(good))
            pinned = self._mirror.pinned if self._mirror else ()  # being copied: it goes the next time
            for step in filter(lambda step: step not in pinned, gone):
                shutil.rmtree(_rename(self._directory / str(step), _DELETED))
            for entry in self._directory.glob(f"*{_ABANDONED}*"):
                if good and int(entry.name.partition(".")[0]) < good[-1]:
                    shutil.rmtree(_rename(entry, _DELETED))

    # ------------------------------------------------------------------------------------------------------ the checks

    def _check(self, step: int) -> list[str]:
        """What is wrong with a checkpoint on disk; reads back one that nobody has read back."""
        folder = self._directory / str(step)

        def kind(_):
            try:
                verify.read_mark(self._directory, step)
            except FileNotFoundError:
                return "unverified"
            except (OSError, ValueError) as error:
                return f"{verify.MARK} {verify.reason(error)}"
            return "good"

        found, name = self._agree(None, kind), f"checkpoint/{next(_calls)}"
        if found not in ("good", "unverified"):
            return [found]
        try:
            if found == "unverified":
                return self._read_back(step, name, must_tell=False)
            listed = self._listed(folder, name, also=[verify.MARK])
        except _Unseen as error:
            raise UserError("--workdir", f"{error}", "mount it where all processes see the same files") from None
        except OSError as error:  # in all processes; there may be older ones that can be read
            return [f"it cannot be read back ({error})"]
        try:
            mine = verify.compare_files(folder, verify.read_mark(self._directory, step), *listed, share=_share(),
                                        hashes=self._hashes)
        except (OSError, ValueError) as error:
            mine = [f"{verify.MARK} {verify.reason(error)}"]
        return self._agree(mine, lambda theirs: sorted({problem for problems in theirs for problem in problems}))

    def _read_back(self, step: int, name: str, must_tell: bool = True) -> list[str]:
        """Read a committed checkpoint, each process its share -> what is wrong; if nothing is, it is good from now on.

        Raises OSError if it could not be found out or, unless it need not be told, not be written into it.
        """
        folder = self._directory / str(step)
        mine: dict[str, Any] = {}
        files, wrong = self._listed(folder, name)
        try:
            i, n = _share()
            hashed = {}
            for file in files[i::n]:
                hashed[file] = verify.hash_file(folder / file)
            words, problems = verify.read_back(folder, step, (i, n), lambda: not self._stopping)
            mine = {"files": hashed, "words": words, "problems": [*wrong, *problems]}
        except Exception as error:
            mine = {"unfinished": innermost(error)}

        def decide(shares):
            for share in shares:
                if "unfinished" in share:
                    raise OSError(share["unfinished"])
            problems = sorted({problem for share in shares for problem in share["problems"]})
            if problems:
                return problems
            files = {name: found for share in shares for name, found in share["files"].items()}
            saved = verify.saved_fingerprint(folder)
            problems = [f"{name} is not seen by all" for name in verify.list_files(folder)[0] if name not in files]
            problems += verify.compare_words(saved, [share["words"] for share in shares])
            if not problems:
                with contextlib.nullcontext() if must_tell else contextlib.suppress(OSError):  # the disk may be full
                    verify.write_mark(self._directory, step, {"files": dict(sorted(files.items())),
                                                              "fingerprint": saved, "meta": self.meta(step)})
            return problems

        return together(f"{name}/read", mine, decide)

    def _listed(self, folder: Path, name: str, also: Sequence[str] = ()) -> tuple[list[str], list[str]]:
        """The files as process 0 sees them, once the others see them too; a network file system may take its time."""
        first = jax.process_index() == 0
        files, wrong = together(f"{name}/listed", verify.list_files(folder) if first else None, lambda all: all[0])
        unseen = together(f"{name}/seen", None if first else verify.unseen(folder, [*files, *also]), lambda all: [
            (process, file) for process, file in enumerate(all) if file][:1])
        if unseen:
            raise _Unseen(f"process {unseen[0][0]} does not see {folder / unseen[0][1]}, and process 0 does")
        return files, wrong

    def _pass_over(self, step: int, problems: list[str], name: str | None = None) -> None:
        """Say what is wrong with a checkpoint and put it where nobody chooses it again."""
        folder = self._directory / str(step)

        def put_aside(_):
            try:
                return str(_rename(folder, _DAMAGED))
            except OSError:  # a folder that may be read only is looked at again next time
                return str(folder)

        aside = together(name or f"checkpoint/{next(_calls)}", None, put_aside)
        if aside == str(folder):
            self._passed_over.add(step)
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        self._tell("checkpoint_damaged", f"checkpoint {step} is damaged ({problems[0]}{more}); kept as {aside}",
                   step=step, problems=problems, kept_as=aside)

    def _set_aside(self) -> list[str]:
        return sorted(path.name for path in self._directory.glob(f"*{_DAMAGED}*"))

    # -------------------------------------------------------------------------------------------------------- the load

    def _load(self, step: int, abstract_state: Any) -> Any:
        ocp, folder, wanted = orbax(), self._directory / str(step), flatten(abstract_state)
        loaded, sums, empty, problem = {}, {}, {}, ""
        try:
            with no_echoes():
                # Without the barrier in which the others would wait for one that cannot read.
                me = jax.process_index()
                alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
                reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler(state=ocp.StandardCheckpointHandler()),
                                          multiprocessing_options=alone)
                saved: Any = reader.metadata(folder).item_metadata
                if saved is None or saved.state is None:
                    raise FileNotFoundError("it holds no state")
                empty = {path: zeros_like(leaf) for path, leaf in wanted.items()
                         if path.startswith(YOUNG) and path not in saved.state.tree}
                there = {path: leaf for path, leaf in wanted.items() if path not in empty}
                self._compare(step, saved.state.tree, there)
                arrays = ocp.args.StandardRestore(there)
                loaded = reader.restore(folder, args=ocp.args.Composite(state=arrays))["state"] | empty
                sums = verify.saved_fingerprint(folder)
        except UserError:
            raise
        except Exception as error:
            if distributed.broken(error):
                raise  # a process is gone: that says nothing about the checkpoint
            problem = innermost(error)
        if problem := self._agree(problem, lambda all: next(filter(None, all), "")):
            raise Damaged(problem)
        flat = {path: loaded[path] for path in wanted}
        now = self._agree(fingerprint.read(fingerprint.on_device(flat)), fingerprint.total)
        for path, found in now.items():
            if path not in empty and sums.get(path, (None, None))[1] != found:
                raise Damaged(f"array {path} has other content than when it was saved")
        return jax.tree.unflatten(jax.tree.structure(abstract_state), list(flat.values()))

    def _compare(self, step: int, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
        where = f"{self._directory / str(step)}"
        for path in [*wanted, *saved]:
            ours, theirs = (describe(tree[path]) if path in tree else "missing" for tree in (wanted, saved))
            if ours != theirs:
                raise UserError(path, f"is {theirs} in the checkpoint {where} and {ours} in this run",
                                "build the model and optimizer of that checkpoint, or give another --workdir")

    def _unreadable(self, step: int, reason: str) -> UserError:
        folder = self._directory / str(step)
        if not folder.is_dir():
            return UserError("checkpoint", f"there is no {folder}", "see which steps that directory has")
        return UserError("checkpoint", f"{folder} cannot be read ({reason})",
                         "move it away, and the run resumes from the checkpoint before it")

    # ------------------------------------------------------------------------------------------------------------------

    def _agree(self, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        return together(f"checkpoint/{next(_calls)}", mine, decide)

    def _wait_for_commits(self) -> None:
        for job in self._jobs:
            job.committed.wait()

    def _raise(self) -> None:
        if self._failure:
            raise self._failure

    def _tell(self, kind: str, sentence: str | None, **fields: Any) -> None:
        if jax.process_index() != 0:
            return
        record(self._directory.parent, kind, **fields)
        if sentence:
            say(sentence)


class _Unseen(OSError):
    """Processes do not see the same files."""


class _Job:
    """A save under way."""

    def __init__(self, step: int, name: str):
        self.step, self.name, self.blocked_s = step, name, 0.0
        self.committed = threading.Event()
        self.thread = threading.Thread()


def _share() -> verify.Share:
    return jax.process_index(), jax.process_count()


def _rename(folder: Path, ending: str) -> Path:
    """Set a folder aside, under a name that is free."""
    for number in itertools.count(1):
        to = folder.with_name(f"{folder.name.partition('.')[0]}{ending}{f'.{number}' if number > 1 else ''}")
        if not to.exists():
            return folder.rename(to)
    raise AssertionError
