"""Find the runs below a folder or a URL, and sum up each from the ends of its files."""

import contextlib
import math
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jaxtrain import storage
from jaxtrain.checkpoint.mirror import Mirror
from jaxtrain.config.part_tables import TRACKERS
from jaxtrain.errors import UserError
from jaxtrain.files.bounded_files import misfit, opened
from jaxtrain.plan.cost.spending import price
from jaxtrain.runs import tags
from jaxtrain.runs.recorded_run import RecordedRun

TAIL = 2**16  # bytes: the newest lines of a log
DEPTH = 4  # folders below the root
_FEW = 2**12  # bytes with the newest lines of most runs
_LARGER = 2**24  # where the last TAIL bytes have no line of a step
_OWN = {"checkpoints", "ledger", "heartbeats", "jobs", "tokenizer", "gates", "profiles", "hangs", "trackers",
        *TRACKERS.own}  # folders of a run, in which there are no other runs
_SMALL_FILES = ("config.json", "run.json", tags.FILE)
_LOGS = ("metrics.jsonl", "events.jsonl", "evaluations/metrics.jsonl")
_RECORDS = re.compile(r"ledger/\d+\.json|checkpoints/\d+/good\.json")  # small files, of which there are many
_RUN = {"config_file?": str, "config_hash?": str, "git_commit?": str | None, "device_kind?": str,
        "mesh?": {str: int}, "run?": str,
        "init_from?": dict, "data_manifests?": {str: str}, "packages?": {str: str | None}}
_META = {"time?": int | float, "loss?": int | float | None, "config?": {str: dict}, "goodput?": int | float | None,
         "git_commit?": str | None, "config_hash?": str}


@dataclass
class Summary:
    """The summary of a run; None and "": not known."""

    place: str  # its workdir, or the URL of its copy
    state: str = ""  # as RecordedRun.state, "damaged", or "mirror": only its checkpoints are there
    problem: str = ""  # why it cannot be read
    step: int | None = None
    last_step: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    goodput: float | None = None
    cost: float | None = None  # in dollars
    config: str = ""  # the name of its file, such as gpt.py:tiny
    config_hash: str = ""
    commit: str = ""
    size: int = 0  # bytes on disk
    time: float | None = None  # its last sign of life
    tags: Sequence[str] = ()


def summaries(root: str, depth: int = DEPTH) -> list[Summary]:
    """Return a summary of every run below a folder or a URL, the newest first."""
    if storage.is_url(root):
        with ThreadPoolExecutor(8) as threads:
            found = [one for one in threads.map(lambda url: _remote(*url), _urls(root, depth)) if one]
    else:
        found = [summary(workdir) for workdir in workdirs(root, depth)]
    return sorted(found, key=lambda one: (-(one.time or 0), one.place))


def workdirs(root: str | Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield the workdirs at a folder and below it, in the order of their names; links to folders are not followed."""
    root = Path(root)
    if not root.is_dir():
        raise UserError("ROOT", f"there is no folder {root}", "give the one that workdirs are in")
    level = [(root, 0)]
    while level:
        folder, below = level.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        names = {entry.name for entry in entries}
        if found := _is_run(names):
            yield folder
        level += [(folder / entry.name, below + 1) for entry in sorted(entries, key=lambda one: one.name, reverse=True)
                  if below < depth and entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
                  and not (found and entry.name in _OWN)]


def _is_run(names: set[str]) -> bool:
    return {"config.json", "metrics.jsonl"} <= names or (
        "run.json" in names and bool(names & {"config.json", "metrics.jsonl", "ledger"}))


def summary(workdir: str | Path, now: float | None = None) -> Summary:
    """Return the summary of a workdir; one that cannot be read gets the reason."""
    workdir = Path(workdir)
    found = Summary(f"{workdir}", size=size_of(workdir), time=changed(workdir))
    try:
        run, made = _newest_lines(workdir), tags.of(workdir)
        if wrong := misfit(run.config, {"train?": {"steps?": int}}) or misfit(run.run, _RUN):
            raise UserError("WORKDIR", f"config.json or run.json is damaged: {wrong}", "bring it back")
    except UserError as error:
        found.state, found.problem = "damaged", error.reason.removeprefix(f"{workdir} ").removeprefix(f"{workdir}/")
        return found
    line, account, rate = run.steps.last, run.account, hourly(run)
    found.state, found.tags = run.state(now), made
    found.step, found.last_step = _whole(line.get("step")), run.last_step
    found.loss, found.eval_loss = number(line.get("loss")), number(run.evaluations.last.get("eval_loss"))
    found.config = ":".join(Path(part).name for part in (run.run.get("config_file") or "").split(":"))
    found.config_hash, found.commit = run.run.get("config_hash") or "", run.run.get("git_commit") or ""
    if account:
        found.goodput, found.time = account.goodput, run.sign
        found.cost = rate * account.lived / 3600 if rate else None
    return found


def _newest_lines(workdir: Path) -> RecordedRun:
    """Return a run of which only the newest lines were read, back to an evaluation if TAIL bytes have one."""
    enough, evaluated = _back_to_evaluation(workdir / "metrics.jsonl")
    run = RecordedRun(workdir, enough)
    if enough < TAIL and not (len(run.steps) and len(run.evaluations) >= evaluated):  # a line is damaged, or very long
        run = RecordedRun(workdir, TAIL)
    return run if len(run.steps) else RecordedRun(workdir, _LARGER)


def _back_to_evaluation(log: Path) -> tuple[int, bool]:
    """Return in how many last bytes of a log the newest lines are, and whether one of an evaluation is among them."""
    end = b""
    with contextlib.suppress(OSError), opened(log) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        end = file.read(TAIL)
    found = end.rfind(b'"eval_loss"')
    start = end.rfind(b"\n", 0, found) if found >= 0 else len(end)
    return min(TAIL, max(_FEW, len(end) - start)), found >= 0


def hourly(run: RecordedRun) -> float:
    """Return the price of an hour of a run's devices, in dollars; 0: it is not known."""
    if misfit(run.run, _RUN):
        return 0.0
    return price(run.run.get("device_kind", "")) * math.prod(run.run.get("mesh", {}).values())


def number(value: object) -> float | None:
    """Return a number that is finite, or None."""
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def size_of(path: str | Path) -> int:
    """Return the bytes of a file, or of all files in a folder; links count as links."""
    try:
        status = os.lstat(path)
    except OSError:  # it was deleted meanwhile, or cannot be read
        return 0
    return _inside(path) if stat.S_ISDIR(status.st_mode) else status.st_size


def _inside(folder: str | Path) -> int:
    """Return the bytes of all files in a folder; one look at each entry, since checkpoints have many."""
    size = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    size += _inside(entry.path) if entry.is_dir(follow_symlinks=False) else entry.stat(
                        follow_symlinks=False).st_size
    except OSError:  # it was deleted meanwhile, or cannot be read
        return size
    return size


def changed(workdir: Path) -> float | None:
    """Return when the newest of a run's own files was written."""
    times = []
    for name in ("metrics.jsonl", "events.jsonl", "run.json", "config.json"):
        try:
            times.append(os.lstat(workdir / name).st_mtime)
        except OSError:
            continue
    return max(times, default=None)


# ------------------------------------------------------------------------------------------------------ object storage
def _urls(root: str, depth: int) -> Iterator[tuple[str, bool]]:
    """Yield the URLs below which a run is, and whether it is a copied workdir, and not only a mirror of checkpoints."""
    level = [(root.rstrip("/"), 0)]
    while level:
        url, below = level.pop()
        names, inside = set(storage.names(url)), storage.folders(url)
        found = _is_run(names)
        if found or any(name.isdecimal() for name in inside):
            yield url, found
        level += [(storage.join(url, name), below + 1) for name in reversed(inside)
                  if below < depth and not name.isdecimal() and not (found and name in _OWN)]


def _remote(url: str, is_workdir: bool) -> Summary | None:
    return _copied_workdir(url) if is_workdir else _mirrored(url)


def _copied_workdir(url: str) -> Summary:
    """Sum up a workdir in object storage: its small files and the ends of its logs are fetched, and no more."""
    try:
        with at_hand(url, TAIL) as here:
            found = summary(here.folder)
            found.problem, found.size = found.problem.removeprefix(f"{here.folder}/"), here.size
    except (UserError, OSError) as error:
        found = Summary(url, "damaged", f"{error}")
    found.place = url
    return found


@dataclass(frozen=True)
class AtHand:
    """A folder with what a run has recorded, and the bytes of the run where it is."""

    folder: Path
    size: int
    of_checkpoints: int


@contextlib.contextmanager
def at_hand(place: str | Path, last: int | None = None) -> Iterator[AtHand]:
    """Yield the records of a run; those at a URL are copied, without its checkpoints, and deleted afterwards.

    `last`: copy only this many last bytes of a log; None: all of them.
    """
    if not storage.is_url(place):
        yield AtHand(Path(place), size_of(place), size_of(Path(place) / "checkpoints"))
        return
    files = storage.find(str(place))
    with tempfile.TemporaryDirectory(prefix="jaxtrain-") as folder:
        for file in files:
            if file.name in _SMALL_FILES or _RECORDS.fullmatch(file.name):
                _put(folder, file.name, storage.read_small(file.path))
            elif file.name in _LOGS:
                start = max(0, file.size - (file.size if last is None else last))
                end = storage.read(file.path, start, file.size)
                _put(folder, file.name, end.partition(b"\n")[2] if start else end)
        yield AtHand(Path(folder), sum(file.size for file in files),
                     sum(file.size for file in files if file.name.startswith("checkpoints/")))


def _put(folder: str, name: str, content: bytes) -> None:
    path = Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _mirrored(url: str) -> Summary | None:
    """Sum up a mirror by the newest checkpoint that is whole there; None: there is none, so it may be anything."""
    try:
        mirror = Mirror(".", url)
        steps = sorted((int(name) for name in storage.folders(url) if name.isdecimal()), reverse=True)
        record = next((record for step in steps if (record := mirror.good(step))), None)
        if record is None:
            return None
        size = sum(file.size for file in storage.find(url))
    except (UserError, OSError) as error:
        return Summary(url, "damaged", f"{error}")
    meta = record.get("meta", {})
    if wrong := misfit(meta, _META):
        return Summary(url, "damaged", f"good.json of step {record['step']} says what no run wrote: {wrong}", size=size)
    return Summary(url, "mirror", step=record["step"], last_step=_whole(meta.get("config", {}).get("train", {}).get(
        "steps")), loss=number(meta.get("loss")), goodput=number(meta.get("goodput")), size=size,
        config_hash=meta.get("config_hash", ""), commit=meta.get("git_commit") or "", time=number(meta.get("time")))
