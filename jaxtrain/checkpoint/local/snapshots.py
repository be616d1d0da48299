"""The fast tier: every few steps each process keeps its pieces of the state in its machine's memory, and a peer's too.

A process that is lost takes its memory along; its pieces are still with its peer, so that the run goes on from seconds
ago and not from the last durable checkpoint. Whatever processes come back ask each other who has what, take the newest
step of which every piece is there, and build the state from it on the mesh that they have now.

The loop waits for the copy from the devices alone (and for the snapshot before, if that is still being written).
"""

import functools
import hashlib
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.checkpoint.local import pieces
from jaxtrain.checkpoint.local.partners import Partners
from jaxtrain.checkpoint.local.pieces import Damaged
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.distributed.coordination import count, exchange
from jaxtrain.errors import UserError
from jaxtrain.observe import events

_RUN = "snapshots"  # in the checkpoints' folder: the name of the history that snapshots belong to
_NAME = re.compile(r"(\d{9,})-([0-9a-f]{12})-(\d+)of(\d+)\.snapshot")
_ABOUT = "snapshot"


@dataclass(frozen=True, order=True)
class Taken:
    """A snapshot by all processes: the step, the start of the run that took it, and how many they were."""

    step: int
    start: str
    owners: int

    def name(self, owner: int) -> str:
        """Of the file with one process's pieces."""
        return f"{self.step:09}-{self.start}-{owner}of{self.owners}.snapshot"

    @classmethod
    def of(cls, name: str) -> "Taken | None":
        """Which one the file belongs to."""
        found = _NAME.fullmatch(name)
        return cls(int(found[1]), found[2], int(found[4])) if found else None

    def whole(self, names: Any) -> bool:
        """Whether every process's file is among these."""
        return all(self.name(owner) in names for owner in range(self.owners))


class LocalCheckpoints:
    """The snapshots of one run. In a multi-process run every process makes all calls, at the same steps.

    Args:
        every: steps from one to the next; 0: none are taken and none are looked for, and nothing here costs anything.
        local_dir: a folder of this machine ("": in memory); the run gets one of its own in it.
    """

    def __init__(self, workdir: str | Path, every: int, local_dir: str = ""):
        self._workdir, self.every = Path(workdir).absolute(), every
        self._thread: threading.Thread | None = None
        self._blocked: float | None = None  # seconds of the last one, until told
        self._last: int | None = None  # the newest step that this process has kept, and its peer as well
        self._peers: Partners | None = None
        if not every:
            return
        self._folder = folder(workdir, local_dir)
        self._me, self._many = jax.process_index(), jax.process_count()
        self._run, self._start = exchange([_history(self._workdir) if self._me == 0 else "", secrets.token_hex(6)])[0]
        try:
            self._own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError("checkpoint.local_dir", f"{self._folder} cannot be written ({error.strerror})",
                            "give a folder that can be") from None
        self._here = self._scan()
        self._peers = Partners(self._keep, lambda name: self._here[name]) if self._many > 1 else None

    # ------------------------------------------------------------------------------------------------------ to take one
    def due(self, step: int) -> bool:
        """Whether to take one now."""
        return bool(self.every) and step % self.every == 0

    def pop_fields(self) -> dict[str, float]:
        """For the next line of metrics: `snapshot_blocked_s`, the seconds for which one just held up the loop."""
        blocked, self._blocked = self._blocked, None
        return {} if blocked is None else {"snapshot_blocked_s": blocked}

    def take(self, step: int, state: Any, meta: dict[str, Any] | None = None) -> float:
        """Copy this process's pieces to the host; the rest happens in the background. -> seconds the loop was blocked.

        The state may be donated at once.
        """
        began = time.perf_counter()
        self.wait()
        flat = flatten(state)
        names = [(path, flat[path].shape, bounds) for path, bounds, _ in self._owned(flat)]
        arrays = pieces.to_host(flat, self._owned(flat))
        about = {"what": _ABOUT, "run": self._run, "step": step, "time": time.time(), "meta": meta or {}}
        self._thread = threading.Thread(target=self._work, args=(step, about, names, arrays), name="snapshot",
                                        daemon=True)
        self._thread.start()
        self._blocked = time.perf_counter() - began
        return self._blocked

    def wait(self) -> None:
        """Return when the one under way is kept, or given up; a peer that says nothing is given up in a minute."""
        if self._thread:
            self._thread.join()

    def close(self) -> None:
        """Wait, and answer nobody any more."""
        self.wait()
        if self._peers:
            self._peers.close()

    def remove(self) -> None:
        """Give the memory back: the run will go on from somewhere newer, if at all."""
        if self.every:
            for place in self._mine():
                shutil.rmtree(place, ignore_errors=True)
            _rmdir(self._folder)

    def _work(self, step: int, about: dict[str, Any], names: Sequence[tuple], arrays: list[np.ndarray]) -> None:
        taken = Taken(step, self._start, self._many)
        try:
            self._make_room(step)
            path = self._own / taken.name(self._me)
            pieces.write(path, about, names, arrays)
            self._here[path.name] = path
            if self._peers:
                self._peers.send(self._peers.partner, path)
            count(f"{self._start}/{step}", 1)
            self._last = step
        except Exception as error:  # a full disk, a peer that is gone: training goes on, and the next one may succeed
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            self._tell("snapshot_failed", f"snapshot of step {step} by process {self._me} failed ({reason}); "
                       "training goes on, the one before is kept", step=step, reason=reason)

    def _make_room(self, step: int) -> None:
        """Before one is written: the last that everybody has is kept; where that is not known, the last two are.

        What is of this step or a later one belongs to a past that the run turned back from.
        """
        older = {taken.step for place in self._mine() for taken in map(Taken.of, _names(place))
                 if taken and taken.step < step}
        keep = sorted(older)[-2:]
        if self._last in older and count(f"{self._start}/{self._last}", 0) >= self._many:
            keep = [self._last]
        # A peer that is ahead of us has sent its pieces of this one already.
        self._remove(lambda taken: taken.step not in keep and (taken.start, taken.step) != (self._start, step))

    def forget(self, above: int) -> None:
        """The run goes back to this step: what was taken after it will not be gone on from."""
        if self.every:
            self.wait()
            self._remove(lambda taken: taken.step > above)

    def _remove(self, which: Any) -> None:
        for place in self._mine():
            for name in _names(place):
                if (taken := Taken.of(name)) and which(taken):
                    self._here.pop(name, None)
                    (place / name).unlink(missing_ok=True)

    def _owned(self, flat: dict[str, jax.Array]) -> list[tuple]:
        if not hasattr(self, "_plan"):  # shardings are the same all through a run
            self._plan = pieces.owned(flat, self._me)
        return self._plan

    # --------------------------------------------------------------------------------------------------- to go on from
    def restore_newest(self, abstract: Any, above: int = 0) -> tuple[int, Any, dict[str, Any]] | None:
        """(step, state, meta) of the newest one after step `above` of which every piece is there and right, or None.

        `abstract`: a pytree of `jax.ShapeDtypeStruct` with shardings, on any mesh and any number of processes.
        """
        if not self.every:
            return None
        told = exchange([above, sorted(self._here)])
        names = {name for _, held in told for name in held}
        found = {taken for taken in map(Taken.of, names) if taken and taken.step > told[0][0] and taken.whole(names)}
        for taken in sorted(found, reverse=True):
            holders = exchange([name for name in sorted(self._here) if Taken.of(name) == taken and self._checked(name)])
            if not taken.whole({name for held in holders for name in held}):
                continue
            state, meta, problem = None, {}, ""
            try:
                state, meta = self._load(abstract, taken, holders)
            except (Damaged, OSError) as error:
                problem = f"{error}"
            if problems := [problem for problem in exchange(problem) if problem]:  # then it is nobody's
                self._tell("snapshot_passed_over", f"snapshot of step {taken.step} cannot be used ({problems[0]})",
                           step=taken.step, reason=problems[0])
                continue
            self._tell("snapshot_restored", "", step=taken.step, owners=taken.owners)
            return taken.step, state, meta
        return None

    def _load(self, abstract: Any, taken: Taken, holders: list[list[str]]) -> tuple[Any, dict[str, Any]]:
        wanted, parts, meta = flatten(abstract), {}, {}
        for owner in range(taken.owners):
            name = taken.name(owner)
            having = [process for process, held in enumerate(holders) if name in held]
            if self._me in having:
                read = pieces.reader(self._here[name])
            else:
                assert self._peers
                read = functools.partial(self._peers.fetch, having[self._me % len(having)], name)
            header = pieces.read_header(read)
            meta = header.about["meta"]
            for piece in header.pieces:
                parts.setdefault(piece.path, []).append(
                    (piece, functools.partial(pieces.read_piece, read, header, piece)))
        for path in [*wanted, *parts]:
            ours = (wanted[path].shape, np.dtype(wanted[path].dtype).name) if path in wanted else "missing"
            theirs = (parts[path][0][0].shape, parts[path][0][0].dtype) if path in parts else "missing"
            if ours != theirs:
                raise Damaged(f"{path} is {theirs} in it and {ours} in this run")
        leaves = [pieces.assemble(leaf, parts[path]) for path, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves), meta

    def _checked(self, name: str) -> bool:
        """Whether one of the copies here is right; that one is read from now on."""
        for path in sorted(self._folder.glob(f"process-*/*/{name}")):
            try:
                pieces.check(path)
                self._here[name] = path
                return True
            except (Damaged, OSError) as error:
                self._tell("snapshot_damaged", f"{path} is damaged ({error}); it is not used", path=str(path),
                           reason=str(error))
        return False

    # ------------------------------------------------------------------------------------------------------- the files
    @property
    def _own(self) -> Path:
        return self._folder / f"process-{self._me}" / "own"

    def _keep(self, process: int, name: str) -> Path:
        """Where a peer's file goes; it can be given away as soon as it is there."""
        if not Taken.of(name):
            raise OSError(f"{name} is not the name of a snapshot")
        path = self._here[name] = self._own.with_name(f"peer-{process}") / name
        return path

    def _mine(self) -> list[Path]:
        """The folders that this process cleans up: its own, and those of processes that there are no more."""
        places = [place for place in self._folder.glob("process-*/*") if place.is_dir()]
        return [place for place in places
                if (number := int(place.parent.name.rpartition("-")[2])) == self._me or number >= self._many]

    def _scan(self) -> dict[str, Path]:
        """The files on this machine that belong to this history; others of ours go."""
        here, mine = {}, self._mine()
        for path in self._folder.glob("process-*/*/*.snapshot"):
            try:
                right = pieces.read_header(pieces.reader(path)).about["run"] == self._run
            except Damaged:
                right = False
            if right:
                here[path.name] = path
            elif path.parent in mine:
                path.unlink(missing_ok=True)
        return here

    def _tell(self, kind: str, sentence: str, **fields: Any) -> None:
        events.tell(self._workdir, kind, sentence, **fields)


def folder(workdir: str | Path, local_dir: str = "") -> Path:
    """Where a run's snapshots are on this machine. Its environment counts, as in "$SLURM_TMPDIR"."""
    workdir = Path(workdir).absolute()
    if not local_dir:
        local_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    digest = hashlib.sha256(str(workdir).encode()).hexdigest()[:12]
    return Path(os.path.expandvars(local_dir)).expanduser().absolute() / f"jaxtrain-{workdir.name}-{digest}"


def turn_back(workdir: str | Path) -> None:
    """No snapshot taken so far will be gone on from, wherever it is: the run begins another history."""
    (Path(workdir) / "checkpoints" / _RUN).unlink(missing_ok=True)


def _history(workdir: Path) -> str:
    """Kept with the checkpoints: who deletes them, to begin anew, has begun anew."""
    path = workdir / "checkpoints" / _RUN
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(secrets.token_hex(8))
        os.replace(temporary, path)
    return path.read_text()


def _names(place: Path) -> list[str]:
    return [path.name for path in place.glob("*.snapshot")]


def _rmdir(place: Path) -> None:
    for path in [*place.glob("process-*"), place]:
        try:
            path.rmdir()
        except OSError:  # others' are still in it
            continue
