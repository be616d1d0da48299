"""The fast checkpoint tier: every few steps each process keeps its part of the state in host memory and on a peer.

A lost process takes its memory with it, but its peer still has the pieces, so the run continues from seconds ago rather
than from the last durable checkpoint. At a restart all processes exchange what they hold, take the newest step whose
pieces are all available, and build the state from it on the current mesh.

The training loop waits only for the copy from the devices (and for the previous snapshot, if it is still being
written).
"""

import contextlib
import functools
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.base.annotations import JsonObject, PyTree
from jaxtrain.checkpoint.due_steps import is_due
from jaxtrain.checkpoint.local import pieces
from jaxtrain.checkpoint.local.partners import Partners
from jaxtrain.checkpoint.local.pieces import Damaged
from jaxtrain.checkpoint.trees import flatten
from jaxtrain.distributed.coordination import count, exchange
from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import read
from jaxtrain.observe import events

_RUN = "snapshots"  # in the checkpoint directory: the id of the history that snapshots belong to
_NAME = re.compile(r"(\d{9,})-([0-9a-f]{12})-(\d+)of(\d+)\.snapshot")
_ABOUT = "snapshot"


@dataclass(frozen=True, order=True)
class Taken:
    """A snapshot by all processes: its step, the id of the start that took it, and the number of processes."""

    step: int
    start: str
    owners: int

    def name(self, owner: int) -> str:
        """Return the file name of one process's pieces."""
        return f"{self.step:09}-{self.start}-{owner}of{self.owners}.snapshot"

    @classmethod
    def of(cls, name: str) -> "Taken | None":
        """Return the snapshot that a file belongs to, or None if the name is not that of a snapshot."""
        found = _NAME.fullmatch(name)
        return cls(int(found[1]), found[2], int(found[4])) if found else None

    def whole(self, names: Iterable[str]) -> bool:
        """Return whether the files of all processes are among these names."""
        return all(self.name(owner) in names for owner in range(self.owners))


class LocalCheckpoints:
    """The snapshots of one run; in a multi-process run every process makes all calls, at the same steps.

    Args:
        every: steps between snapshots; 0: none are taken or looked for, at no cost.
        local_dir: a folder on this machine ("": in memory), in which the run gets its own subfolder.
    """

    def __init__(self, workdir: str | Path, every: int, local_dir: str = ""):
        self._workdir, self.every = Path(workdir).absolute(), every
        self._thread: threading.Thread | None = None
        self._blocked: float | None = None  # seconds that the last one blocked the loop, until reported
        self._last: int | None = None  # the newest step that both this process and its peer have stored
        self._peers: Partners | None = None
        if not every:
            return
        self._folder = folder(workdir, local_dir)
        self._me, self._many = jax.process_index(), jax.process_count()
        self._run, self._start = exchange([_history(self._workdir) if self._me == 0 else "", secrets.token_hex(6)])[0]
        try:
            _make_private(self._folder)
            self._own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError("checkpoint.local_dir", f"{self._folder} cannot be written ({error.strerror})",
                            "give a folder that can be") from None
        self._here = self._scan()
        self._peers = Partners(self._keep, lambda name: self._here[name]) if self._many > 1 else None

    # ------------------------------------------------------------------------------------------------------ to take one
    def due(self, step: int) -> bool:
        """Return whether to take a snapshot after this step."""
        return is_due(step, self.every)

    def pop_fields(self) -> dict[str, float]:
        """Return `snapshot_blocked_s`, the seconds the last snapshot blocked the loop, for the next line of metrics."""
        blocked, self._blocked = self._blocked, None
        return {} if blocked is None else {"snapshot_blocked_s": blocked}

    def take(self, step: int, state: PyTree, meta: JsonObject | None = None) -> float:
        """Copy this process's pieces to the host and finish in the background; return the seconds the loop was blocked.

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
        """Wait until the snapshot in progress is stored or has failed; a silent peer is given up after a minute."""
        if self._thread:
            self._thread.join()

    def close(self) -> None:
        """Wait for the snapshot in progress and stop serving peers."""
        self.wait()
        if self._peers:
            self._peers.close()

    def remove(self) -> None:
        """Delete this process's snapshots, which frees their memory."""
        if self.every and private(self._folder):
            for place in self._mine():
                shutil.rmtree(place, ignore_errors=True)  # refuses links, and follows none
            _rmdir(self._folder)

    def _work(self, step: int, about: JsonObject, names: Sequence[tuple], arrays: list[np.ndarray]) -> None:
        taken = Taken(step, self._start, self._many)
        try:
            _make_private(self._folder)  # something may have deleted it
            self._make_room(step)
            path = self._own / taken.name(self._me)
            pieces.write(path, about, names, arrays)
            self._here[path.name] = path
            if self._peers:
                self._peers.send(self._peers.partner, path)
            count(f"{self._start}/{step}", 1)
            self._last = step
        except Exception as error:  # such as a full disk or a lost peer: training goes on, and the next one may succeed
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            self._tell("snapshot_failed", f"snapshot of step {step} by process {self._me} failed ({reason}); "
                       "training goes on, the previous one is kept", step=step, reason=reason)

    def _make_room(self, step: int) -> None:
        """Delete old snapshots before writing one: keep the last that all processes stored, or the last two if unknown.

        Snapshots of this step or later ones belong to a history that the run rolled back.
        """
        older = {taken.step for place in self._mine() for taken in map(Taken.of, _names(place))
                 if taken and taken.step < step}
        keep = sorted(older)[-2:]
        if self._last in older and count(f"{self._start}/{self._last}", 0) >= self._many:
            keep = [self._last]
        # A peer that is ahead has already sent its pieces of this step.
        self._remove(lambda taken: taken.step not in keep and (taken.start, taken.step) != (self._start, step))

    def forget(self, above: int) -> None:
        """Delete snapshots after step `above`, since the run rolls back to it."""
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
        if not hasattr(self, "_plan"):  # shardings do not change during a run
            self._plan = pieces.owned(flat, self._me)
        return self._plan

    # --------------------------------------------------------------------------------------------------- to go on from
    def restore_newest(self, abstract: PyTree, above: int = 0) -> tuple[int, PyTree, JsonObject] | None:
        """Return (step, state, meta) of the newest intact, complete snapshot after step `above`, or None.

        Args:
            abstract: a pytree of `jax.ShapeDtypeStruct` with shardings, on any mesh and any number of processes.
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
            if problems := [problem for problem in exchange(problem) if problem]:  # if one cannot, none does
                self._tell("snapshot_passed_over", f"snapshot of step {taken.step} cannot be used ({problems[0]})",
                           step=taken.step, reason=problems[0])
                continue
            self._tell("snapshot_restored", "", step=taken.step, owners=taken.owners)
            return taken.step, state, meta
        return None

    def _load(self, abstract: PyTree, taken: Taken, holders: list[list[str]]) -> tuple[PyTree, JsonObject]:
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
        """Return whether a copy on this machine is intact, and read from that copy from now on."""
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
        """Return where to store a peer's file; it can be served as soon as it is there."""
        if not Taken.of(name):
            raise OSError(f"{name} is not the name of a snapshot")
        _make_private(self._folder)
        path = self._here[name] = self._own.with_name(f"peer-{process}") / name
        return path

    def _mine(self) -> list[Path]:
        """Return the folders that this process cleans up: its own, and those of ranks that no longer exist."""
        places = [place for place in self._folder.glob("process-*/*") if private(self._folder)
                  and place.is_dir() and not place.is_symlink() and not place.parent.is_symlink()]
        return [place for place in places
                if (number := int(place.parent.name.rpartition("-")[2])) == self._me or number >= self._many]

    def _scan(self) -> dict[str, Path]:
        """Return this history's files on this machine, and delete what is ours to delete: files of other histories, and
        those that a process killed meanwhile left half-written.
        """
        here, mine = {}, self._mine()
        for place in mine:
            for path in place.glob("*.snapshot.tmp"):
                path.unlink(missing_ok=True)
        for path in self._folder.glob("process-*/*/*.snapshot"):
            try:
                right = pieces.read_header(pieces.reader(path)).about["run"] == self._run
            except Damaged:  # or made with a secret that this process was not given: not used, and not deleted
                continue
            if right:
                here[path.name] = path
            elif path.parent in mine:
                path.unlink(missing_ok=True)
        return here

    def _tell(self, kind: str, sentence: str, **fields: object) -> None:
        events.tell(self._workdir, kind, sentence, **fields)


def folder(workdir: str | Path, local_dir: str = "") -> Path:
    """Return the folder of a run's snapshots on this machine; expands environment variables such as "$SLURM_TMPDIR"."""
    workdir = Path(workdir).absolute()
    if not local_dir:
        local_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    digest = hashlib.sha256(str(workdir).encode()).hexdigest()[:12]
    return Path(os.path.expandvars(local_dir)).expanduser().absolute() / f"jaxtrain-{workdir.name}-{digest}"


def _make_private(place: Path) -> None:
    """Make the folder of a run's snapshots unless it is there; raises `UserError` if it is not this user's alone.

    Its name can be computed, and anybody may make a folder, or a link, of that name in `/dev/shm` first.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(place, 0o700)
    if not private(place):
        raise UserError("checkpoint.local_dir", f"{place} is not a folder that belongs to you and that only you can "
                        "enter, so snapshots would not be safe in it", "remove it, or give another folder")


def private(place: Path) -> bool:
    """Return whether this is a folder, no link to one, that belongs to this user and that nobody else can enter."""
    try:
        found = os.lstat(place)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def turn_back(workdir: str | Path) -> None:
    """Start a new history for the run, so that no snapshot taken so far is restored from."""
    (Path(workdir) / "checkpoints" / _RUN).unlink(missing_ok=True)


def _history(workdir: Path) -> str:
    """Return the id of the run's history; kept with the checkpoints, so deleting them starts a new history."""
    path = workdir / "checkpoints" / _RUN
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write(path, secrets.token_hex(8))
    return read(path).decode(errors="replace")


def _names(place: Path) -> list[str]:
    return [path.name for path in place.glob("*.snapshot")]


def _rmdir(place: Path) -> None:
    for path in [*place.glob("process-*"), place]:
        try:
            path.rmdir()
        except OSError:  # it still holds other processes' files
            continue
