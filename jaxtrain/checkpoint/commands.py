"""The checkpoint commands: list, verify and compare a run's checkpoints, or go back to one."""

import contextlib
import json
import math
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.base.annotations import JsonObject
from jaxtrain.checkpoint import verify
from jaxtrain.checkpoint.local import pieces, snapshots
from jaxtrain.checkpoint.local.snapshots import Taken
from jaxtrain.checkpoint.mirror import Mirror
from jaxtrain.checkpoint.step_folders import ABANDONED, DAMAGED
from jaxtrain.distributed import run_processes
from jaxtrain.distributed.run_lock import locked
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import misfit, read_json
from jaxtrain.files.work_progress import Work
from jaxtrain.pages.plain_text import age, aligned, in_bytes
from jaxtrain.redaction import is_hidden

SET_ASIDE = ".set_aside"
_ENDINGS = {DAMAGED: "damaged: found by verification and not used", ABANDONED: "the run went back to before it",
            SET_ASIDE: "set aside by restore-to", ".fetching": "not complete: being fetched from the mirror",
            ".orbax-checkpoint-tmp": "not complete: being written, or the run ended meanwhile"}
_HIDDEN = " as --mirror=URL"


# ------------------------------------------------------------------------------------------------------- what is there
@dataclass
class Listing:
    """All checkpoints of a workdir, with what is to be said of the whole."""

    rows: list[dict[str, Any]]  # "size" in bytes, "time" in seconds since 1970
    notes: list[str]  # such as that the mirror could not be read
    last: str  # from which checkpoint the run resumes


def show(workdir: str | Path, mirror_url: str = "") -> str:
    """Return a table of all checkpoints as text; `mirror_url` replaces that of the run's config."""
    found = listed(workdir, mirror_url)
    if not found.rows:
        return "\n".join([f"{workdir} has no checkpoints yet", *found.notes])
    return "\n".join([*aligned([("step", "state", "where", "size", "age", "loss", "mesh"), *map(_cells, found.rows)]),
                      *found.notes, found.last])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return what a table shows of a checkpoint."""
    loss, mesh = row["loss"], row["mesh"]
    axes = "" if mesh is None else " ".join(f"{axis}={many}" for axis, many in mesh.items() if many > 1) or "one device"
    return (f"{row['step']}", row["state"], ", ".join(row["where"]), in_bytes(row["size"]),
            age(time.time() - row["time"]) if row["time"] else "", "" if loss is None else f"{loss:.4f}", axes)


def listed(workdir: str | Path, mirror_url: str = "") -> Listing:
    """Return all checkpoints of a workdir, here, in its mirror and in memory."""
    directory, config = _directory(workdir), _config(workdir)
    if not directory.is_dir() and any(Path(workdir).iterdir()) and not Path(workdir, "config.json").exists():
        raise UserError("WORKDIR", f"{workdir} is not a run's workdir: it has neither checkpoints/ nor config.json",
                        "give the --workdir of a run")
    local, notes = verify.steps(directory), []
    copies: dict[int, Any] = {}
    if place := mirror_url or config.get("mirror"):
        try:
            mirror = Mirror(directory, place)
            copies = {step: mirror.good(step) for step in mirror.steps()}
        except UserError as error:
            notes.append(f"the mirror could not be read: {error}{_HIDDEN * is_hidden(place)}")
    rows, good, unread = [], [], []
    for step in sorted({*local, *copies}):
        record = verify.good(directory, step)
        problems = _at_a_glance(directory / str(step), record) if record else []
        state = (f"damaged: {problems[0]}" if problems else "good" if record else
                 "only in the mirror" if step not in local else _unmarked(directory / str(step)))
        good += [step] if record and (not problems or step in copies) else []
        unread += [step] if state.startswith("not verified") else []
        where = [name for name, there in (("local", step in local), ("mirror", step in copies)) if there]
        rows.append(_row(step, state, where, record or copies.get(step) or {}, directory / str(step)))
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        ending = next((ending for ending in _ENDINGS if ending in path.name), None)
        if ending and path.is_dir() and (step := path.name.partition(".")[0]).isdecimal():
            rows.append(_row(int(step), f"{_ENDINGS[ending]} ({path.name})", ["local"], {}, path))
    kept = _snapshots(workdir, config.get("local_dir", ""))
    rows += kept
    newer = ", or from a newer snapshot" * bool(good and any(row["step"] > good[-1] for row in kept))
    younger = [step for step in unread if good and step > good[-1]]
    first = f"step {younger[-1]} if it reads back whole, else from " if younger else ""
    last = (f"the run resumes from {first}step {good[-1]}{newer}; `good` says that it was read back whole when it was "
            "saved, and `verify` reads it again") if good else (
        "no checkpoint here is good; those not verified yet are read back when the run starts" if local else
        "there is no checkpoint here")
    return Listing(rows, notes, last)


def _row(step: int, state: str, where: list[str], record: JsonObject, folder: Path) -> dict[str, Any]:
    meta = record.get("meta", {})
    meta = {} if misfit(meta, {"time?": int | float, "mesh?": {str: int}}) else meta
    size = sum(size for size, _ in record["files"].values()) if "files" in record else sum(
        path.stat().st_size for path in folder.rglob("*") if path.is_file())
    then = meta.get("time") or (folder.stat().st_mtime if folder.exists() else None)
    loss = meta.get("loss")
    return {"step": step, "state": state, "where": where, "size": size, "time": then,
            "loss": loss if isinstance(loss, float) else None, "mesh": meta.get("mesh")}


def _at_a_glance(folder: Path, record: JsonObject) -> list[str]:
    """Return problems visible from file names and sizes; checking the content takes as long as reading it."""
    if not any(folder.glob("*/*")):
        return ["its files are gone"]
    return verify.compare_files(folder, record, *verify.list_files(folder), hashes=False)


def _unmarked(folder: Path) -> str:
    return ("damaged: its good.json is not what was written" if (folder / verify.MARK).exists()
            else "not verified yet: the next start of the run does it, or `verify` here")


def _snapshots(workdir: str | Path, local_dir: str) -> list[dict[str, Any]]:
    """Return rows for the snapshots on this machine, complete or partial."""
    place = snapshots.folder(workdir, local_dir)
    held: dict[Taken, dict[str, Path]] = {}
    for path in place.glob("process-*/*/*.snapshot") if snapshots.private(place) else ():
        if taken := Taken.of(path.name):
            held.setdefault(taken, {})[path.name] = path
    rows: list[dict[str, Any]] = []
    for taken, files in sorted(held.items()):
        about: dict[str, Any] = {}
        with contextlib.suppress(pieces.Damaged):
            about = pieces.read_header(pieces.reader(next(iter(files.values())))).about
        state = "in memory" if taken.whole(files) else f"in memory: {len(files)} of {taken.owners} parts are here"
        rows.append({"step": taken.step, "state": state, "where": ["snapshot"],
                     "size": sum(path.stat().st_size for path in files.values()), "time": about.get("time"),
                     "loss": about.get("meta", {}).get("loss") or None, "mesh": None})
    return rows


@dataclass(frozen=True)
class Verified:
    """A checkpoint after every byte of it was read."""

    step: int
    good: bool
    problems: list[str]
    files: int
    verified_before: bool

    def __str__(self) -> str:
        if self.problems:
            more = [f"\n  and {problem}" for problem in self.problems[1:]]
            return f"step {self.step}: damaged: {self.problems[0]}{''.join(more)}"
        later = "" if self.verified_before else " (not verified before; the next start of the run marks it good)"
        return f"step {self.step}: good: {self.files} files were read, and all is as it was saved{later}"


@dataclass(frozen=True)
class Difference:
    """A difference between two checkpoints, as a line and as what JSON has of it."""

    line: str
    facts: JsonObject


def verified(workdir: str | Path, steps: list[int]) -> Iterator[Verified]:
    """Yield what became of each checkpoint."""
    directory = _directory(workdir)
    there = verify.steps(directory)
    for step in steps:
        _known(directory, step, there)
    if not there:
        raise UserError("WORKDIR", f"{workdir} has no checkpoints yet",
                        "see the steps that `jaxtrain checkpoint list` shows")
    for step in steps or there:
        with Work(f"step {step}", _to_read(directory, step)) as work:
            problems = verify.verify(directory, step, work.add)
        files = verify.list_files(directory / str(step))[0] if not problems else ()
        yield Verified(step, not problems, list(problems), len(files), verify.good(directory, step) is not None)


def _to_read(directory: Path, step: int) -> int:
    """Return the bytes that are read to verify a checkpoint: all of its files, and its arrays from them once more."""
    record = verify.good(directory, step) or {}
    arrays = [re.match(r"\D*(\d*)\w*\[(.*)\]", what) for what, _ in record.get("fingerprint", {}).values()]
    return sum(size for size, _ in record.get("files", {}).values()) + sum(
        int(found[1] or 8) * math.prod(map(int, re.findall(r"\d+", found[2]))) // 8 for found in arrays if found)


# ---------------------------------------------------------------------------------------------------------- differences
def diff(workdir: str | Path, step: int, other: str | Path, other_step: int) -> Iterator[Difference]:
    """Yield each difference between two checkpoints, and at last how many arrays are the same.

    Arrays are read piece by piece.
    """
    one, two = (_known(_directory(place), at) for place, at in ((workdir, step), (other, other_step)))
    for folder in (one, two):
        if problems := verify.list_files(folder)[1]:  # reading a pipe would never end
            raise UserError("STEP", f"{folder}: {problems[0]}",
                            "run `jaxtrain checkpoint verify` to see what is damaged")
    try:
        metas = [_flat(verify.saved_meta(folder)) for folder in (one, two)]
        for key in sorted({*metas[0], *metas[1]}):
            values = [json.dumps(meta[key]) if key in meta else "missing" for meta in metas]
            if values[0] != values[1]:
                yield Difference(f"{key}: {values[0]} -> {values[1]}",
                                 {"key": key, **{name: meta.get(key) for name, meta in zip("ab", metas, strict=True)}})
        shapes = [{path: what for path, (what, _) in verify.saved_fingerprint(folder).items()} for folder in (one, two)]
        same = 0
        for path in [*shapes[0], *(path for path in shapes[1] if path not in shapes[0])]:
            ours, theirs = (shape.get(path, "missing") for shape in shapes)
            if ours != theirs:
                yield Difference(f"array {path}: {ours} -> {theirs}", {"array": path, "a": ours, "b": theirs})
            elif difference := _difference(one / "state", two / "state", path):
                yield Difference(f"array {path} {ours}: {difference}", {"array": path, "difference": difference})
            else:
                same += 1
        both = len({*shapes[0], *shapes[1]})
        yield Difference(f"{same} of {both} arrays are the same, bit by bit", {"arrays": both, "same": same})
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError("STEP", f"a checkpoint cannot be read ({f'{error}'.splitlines()[0][:300]})",
                        "run `jaxtrain checkpoint verify` to see what is damaged") from error


def _difference(one: Path, two: Path, path: str) -> str:
    ours, theirs = verify._open(one, path), verify._open(two, path)
    different, largest, nan = 0, 0.0, 0
    for part in verify._pieces(ours):
        a, b = (np.asarray(array[part].read().result()) for array in (ours, theirs))
        unequal = (a != b) & ~((a != a) & (b != b))  # all NaNs are equal
        different += int(unequal.sum())
        if unequal.any():
            distance = np.abs(a.astype(np.float64) - b.astype(np.float64))[unequal]
            nan += int(np.isnan(distance).sum())
            largest = max(largest, np.nanmax(distance, initial=0.0))
    whole = math.prod(ours.shape)
    return (f"{different:,} of {whole:,} elements differ, by at most {largest:.6g}"
            f"{f'; {nan:,} are NaN in only one of them' if nan else ''}") if different else ""


def _flat(tree: JsonObject, above: str = "") -> JsonObject:
    found = {}
    for key, value in tree.items():
        found |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return found


# ---------------------------------------------------------------------------------------------------------- to go back
def set_aside_by(workdir: str | Path, step: int) -> list[int]:
    """Return the steps of the checkpoints that `restore_to` this one would set aside; verifies it, changes nothing."""
    directory = _directory(workdir)
    _refuse_damaged(directory, _known(directory, step), step)
    return [other for other in verify.steps(directory) if other > step]


def _refuse_damaged(directory: Path, folder: Path, step: int) -> None:
    if problems := verify.verify(directory, step):
        raise UserError("STEP", f"{folder} is damaged ({problems[0]})",
                        "choose another step that `jaxtrain checkpoint list` shows as good")


def restore_to(workdir: str | Path, step: int, mirror_url: str = "") -> str:
    """Set everything newer than a good checkpoint aside; return what was done and how to undo it.

    `mirror_url` replaces that of the run's config.
    """
    workdir, directory = Path(workdir), _directory(workdir)
    folder = _known(directory, step)
    with locked(workdir, 0) as other:
        if other:
            raise UserError("WORKDIR", f"another run is using {workdir} ({other})", "stop it, then run this again")
        if living := run_processes.alive(workdir):
            raise UserError("WORKDIR", living, f"stop it, and run this again {run_processes.ALIVE_S} s later")
        return _turn_back(workdir, directory, folder, step, mirror_url or _config(workdir).get("mirror", ""))


def _turn_back(workdir: Path, directory: Path, folder: Path, step: int, place: str) -> str:
    _refuse_damaged(directory, folder, step)
    said, undo = [], []
    for newer in [other for other in verify.steps(directory) if other > step]:
        aside = _free(directory / f"{newer}{SET_ASIDE}")
        (directory / str(newer)).rename(aside)
        said.append(f"checkpoint {newer} is now {aside.name}")
        undo.append(f"mv {aside} {directory / str(newer)}")
    metrics = workdir / "metrics.jsonl"
    if metrics.is_file():
        kept = _free(metrics.with_name(f"{metrics.name}{SET_ASIDE}"))
        shutil.copy2(metrics, kept)
        said.append(f"metrics.jsonl is cut to step {step} at the next start; all of it is kept as {kept.name}")
        undo.append(f"mv {kept} {metrics}")
    snapshots.turn_back(workdir)
    said.append("snapshots taken in memory before now are no longer used")
    if place:
        try:
            hidden = Mirror(directory, place).hide(above=step)
            said += [f"the mirror's copies of {', '.join(map(str, hidden))} are no longer used"] if hidden else []
        except UserError as error:
            said.append(f"the mirror could not be updated ({error}{_HIDDEN * is_hidden(place)}); this matters only if "
                        "the local ones are lost")
    return "\n".join([f"The run goes on from step {step} when it is started again, with the same command as before.",
                      *(f"- {line}" for line in said),
                      *(["To undo this, before the run is started again:", *(f"  {line}" for line in undo)] if undo
                        else ["Nothing was newer."])])


def _free(path: Path) -> Path:
    """Return this path, or a numbered variant of it that does not exist yet."""
    number = 1
    while (found := path if number == 1 else path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return found


# ------------------------------------------------------------------------------------------------------------- helpers
def _directory(workdir: str | Path) -> Path:
    if not Path(workdir).is_dir():
        raise UserError("WORKDIR", f"there is no folder {workdir}", "give the --workdir of the run")
    return Path(workdir).absolute() / "checkpoints"


def _known(directory: Path, step: int, there: list[int] | None = None) -> Path:
    there = verify.steps(directory) if there is None else there
    if step not in there:
        raise UserError("STEP", f"{directory} has no checkpoint of step {step}",
                        f"it has {', '.join(map(str, there)) or 'none'}")
    return directory / str(step)


def _config(workdir: str | Path) -> JsonObject:
    with contextlib.suppress(OSError, ValueError):
        form = {"checkpoint": {"mirror?": str, "local_dir?": str}}
        return read_json(Path(workdir) / "config.json", form)["checkpoint"]
    return {}
