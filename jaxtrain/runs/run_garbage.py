"""Find what can be deleted of runs that ended, and delete it.

Deleted are leftovers (checkpoints that were damaged, abandoned, half deleted or never completed, and lines of metrics
that a run took back), checkpoints of finished runs beyond those to keep, and runs that never trained. Left alone are
runs that may still be running, tagged ones, and checkpoints with which another run below the same root began.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jaxtrain.base.annotations import Json, JsonObject
from jaxtrain.checkpoint import step_folders, verify
from jaxtrain.checkpoint.retention import best_of, dispensable
from jaxtrain.checkpoint.step_folders import FETCHING
from jaxtrain.config.part_tables import TRACKERS
from jaxtrain.config.sections.earlier_keys import as_named_now
from jaxtrain.distributed import run_processes
from jaxtrain.distributed.run_lock import locked
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import misfit, user_json
from jaxtrain.pages.plain_text import age
from jaxtrain.runs import tags
from jaxtrain.runs.recorded_run import RecordedRun
from jaxtrain.runs.run_index import TAIL, changed, size_of, workdirs

_LEFTOVERS = {  # in the names of folders of checkpoints
    step_folders.DAMAGED: "a checkpoint that verification found damaged",
    step_folders.ABANDONED: "a checkpoint that the run went back to before",
    step_folders.DELETED: "a checkpoint that was being deleted",
    step_folders.TEMPORARY: "a checkpoint that was never complete",
    FETCHING: "a fetch from the mirror that was cut off"}
_LAST_RESORT = step_folders.DAMAGED, step_folders.ABANDONED  # where there is no good one that is as new
QUIET_S = 3600.0  # seconds after which a run that did not say that it ended is taken for dead
_ROLLED_BACK = "metrics.rolled_back.jsonl"
_BARE = {"config.json", "run.json", "metrics.jsonl", "events.jsonl", "ledger", "heartbeats", "lock", "tokenizer",
         "trace_id", "trackers", *TRACKERS.own, "checkpoints"}  # what a run makes before it has trained
_MODEL = "model:"  # before the workdir of a reward model
_CONFIG = {"checkpoint?": {"keep_every?": int, "best?": str}, "train?": {"steps?": int}}


@dataclass(frozen=True)
class Garbage:
    """A file or folder that can be deleted."""

    path: Path
    reason: str
    size: int  # bytes


@dataclass
class Found:
    """The files that can be deleted below a root, and the runs that are left alone."""

    workdirs: list[Path] = field(default_factory=list)  # that have garbage
    garbage: list[Garbage] = field(default_factory=list)
    spared: list[tuple[Path, str]] = field(default_factory=list)  # workdir, reason
    origins: set[tuple[str, int]] = field(default_factory=set)  # checkpoints with which runs began: workdir, step


def below(root: str, depth: int, keep: int, tagged: bool = False) -> Found:
    """Return what can be deleted of all runs below a folder.

    Args:
        root: the folder.
        depth: folders below it that are looked into.
        keep: good checkpoints that a finished run keeps.
        tagged: tagged runs too.
    """
    places, found = list(workdirs(root, depth)), Found()
    found.origins = {origin for workdir in places for origin in _origins(workdir)}
    for workdir in places:
        if reason := _untouchable(workdir, tagged):
            found.spared.append((workdir, reason))
        elif garbage := list(of_run(workdir, keep, found.origins)):
            found.workdirs.append(workdir)
            found.garbage += garbage
    return found


def delete(found: Found, keep: int, tagged: bool = False) -> tuple[int, list[str]]:
    """Delete what was found and still is garbage now that its run is locked; return the bytes freed, and failures."""
    freed, failed = 0, []
    for workdir in found.workdirs:
        with locked(workdir, 0) as other:
            if reason := (other and f"{other} works in it") or _untouchable(workdir, tagged):
                failed.append(f"{workdir}: kept: {reason}")
                continue
            known = {one.path for one in found.garbage}
            for one in [one for one in of_run(workdir, keep, found.origins) if one.path in known]:
                try:
                    _delete(one.path)
                    freed += one.size
                except OSError as error:
                    failed.append(f"{one.path} cannot be deleted ({error.strerror or error})")
    return freed, failed


def _delete(path: Path) -> None:
    """Delete a file or a folder; a checkpoint is renamed first, so that half of one never has the name of a whole."""
    if path.name.isdecimal() and path.parent.name == "checkpoints":  # workdirs may be numbers too
        path = step_folders.rename(path, step_folders.DELETED)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _untouchable(workdir: Path, tagged: bool) -> str:
    """Return why nothing of a run may be deleted; "": it may."""
    try:
        if (names := tags.of(workdir)) and not tagged:
            return f"it is tagged {', '.join(names)} (--tagged deletes of tagged runs too)"
        run = RecordedRun(workdir, TAIL)
        if wrong := misfit(run.config, _CONFIG):
            return f"its config.json is damaged: {wrong}"
    except UserError as error:
        return error.reason
    if (workdir / "checkpoints").is_symlink():
        return "its checkpoints are elsewhere, behind a link"
    if (state := run.state()) == "running":
        return "it is running"
    if state in ("silent", "new"):
        sign = max(changed(workdir) or 0.0, run.sign)
        if (silent := time.time() - sign) < QUIET_S:
            return f"it did not say that it ended, and was alive {age(silent)} ago"
    return run_processes.alive(workdir)


def of_run(workdir: Path, keep: int, origins: set[tuple[str, int]]) -> Iterator[Garbage]:
    """Yield what can be deleted of a run that does not run."""
    run, directory = RecordedRun(workdir, TAIL), workdir / "checkpoints"
    if _never_trained(run):
        others = sorted({path.name for path in workdir.iterdir()} - _BARE)
        if not others:
            yield Garbage(workdir, "a run that never trained", size_of(workdir))
            return
    newest = max((step for step in run.checkpoints if _is_whole(directory, step)), default=-1)
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        ending, step = next((ending for ending in _LEFTOVERS if ending in path.name), ""), path.name.partition(".")[0]
        if not ending or not step.isdecimal() or not path.is_dir() or path.is_symlink():
            continue
        if ending not in _LAST_RESORT or int(step) <= newest:
            yield Garbage(path, _LEFTOVERS[ending], size_of(path))
    if (rolled := workdir / _ROLLED_BACK).is_file() and not rolled.is_symlink():
        yield Garbage(rolled, "lines of metrics that the run took back", size_of(rolled))
    if run.state() == "finished":
        for step in _old(run, directory, keep):
            if not origins & {(workdir.name, step), (workdir.resolve().name, step)}:
                old = directory / str(step)
                yield Garbage(old, "an old checkpoint of a finished run", size_of(old))


def _never_trained(run: RecordedRun) -> bool:
    """Return whether a run has no metrics, no step, no checkpoint here or in a mirror, and no job that may begin it."""
    directory, metrics = run.workdir / "checkpoints", run.workdir / "metrics.jsonl"
    return not ((metrics.exists() and metrics.stat().st_size) or (run.account and run.account.step)
                or run.config.get("checkpoint", {}).get("mirror") or (directory.is_dir() and any(directory.iterdir()))
                or (run.workdir / "jobs").exists())


def _old(run: RecordedRun, directory: Path, keep: int) -> list[int]:
    """Return the steps of checkpoints that a finished run does not need; its newest good one is never among them."""
    good = [step for step in run.checkpoints if _is_whole(directory, step)]
    if not good:
        return []
    settings = run.config.get("checkpoint", {})
    best = None
    if key := settings.get("best", ""):
        with contextlib.suppress(OSError, ValueError):
            best = best_of(good, run.workdir, key)
        if best is None:
            return []  # which one is the best cannot be told, so each may be
    others = [step for step in run.checkpoints if step not in good]
    return dispensable(good, others, keep=keep, keep_every=settings.get("keep_every", 0), best=best)


def _is_whole(directory: Path, step: int) -> bool:
    """Return whether a checkpoint was read back when it was saved, and has all files in the same sizes."""
    record = verify.good(directory, step)
    folder = directory / str(step)
    return record is not None and not verify.compare_files(folder, record, *verify.list_files(folder), hashes=False)


def _origins(workdir: Path) -> Iterator[tuple[str, int]]:
    """Yield the checkpoints of other runs with which a run began, or that its config names, as a teacher say.

    Each is the name of a workdir and a step: where that workdir is may have been said relative to another folder, or
    on a machine that mounts it elsewhere.
    """
    said = _json(workdir / "run.json")
    config = _json(workdir / "config.json")
    reward, parts = as_named_now(config).get("rl", {}), said.get("own_parts", {})
    named = [(one["workdir"], one["step"]) for one in _within(said) if isinstance(one, dict)
             and isinstance(one.get("workdir"), str) and isinstance(one.get("step"), int)]
    for text in (one.removeprefix(_MODEL) for one in _within(config) if isinstance(one, str)):
        place, at, step = text.rpartition("@")
        named += [(place, int(step))] if at and step.isdecimal() and step.isascii() else []
    # A reward model that was named without a step: the run keeps the checkpoint that was the newest then.
    if isinstance(reward, dict) and isinstance(place := reward.get("reward"), str) and place.startswith(_MODEL):
        named += [(place.removeprefix(_MODEL), one["step"]) for one in _within(parts) if isinstance(one, dict)
                  and isinstance(one.get("step"), int)]
    for place, step in named:
        yield from {(Path(place).name, step), (Path(place).resolve().name, step)}


def _json(path: Path) -> JsonObject:
    """Return what a file holds; nothing, if it is damaged or missing."""
    with contextlib.suppress(UserError):
        return user_json(path, dict, "WORKDIR", "") or {}
    return {}


def _within(value: object) -> Iterator[Json]:
    """Yield a value of JSON and all values in it."""
    yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _within(one)
