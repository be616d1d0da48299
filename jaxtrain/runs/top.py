"""Runs drawn in a terminal, from what is in their workdirs, so they may be on other machines or have ended."""

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.distributed.run_processes import heartbeats
from jaxtrain.errors import UserError
from jaxtrain.observe.goodput import duration
from jaxtrain.observe.run_panel import STYLES, Reading, columns_of, curve, figures_of, note, panel
from jaxtrain.pages.plain_text import age, in_bytes, plain
from jaxtrain.redaction import redacted
from jaxtrain.runs import run_index, tags
from jaxtrain.runs.recorded_run import RecordedRun
from jaxtrain.storage import is_url

RECENT = 2**22  # bytes of metrics and of events, the newest ones, that are read: some ten thousand steps
EVERY = 1.0  # seconds between two frames
_SEARCH_EVERY = 10.0  # seconds between two looks for new runs below a folder
_SHOWN = 16  # processes
_NOTED = 100  # events, of which those that are not saves may be drawn
_RESULTS = 4  # numbers of a watcher's evaluation
_CURVE = 90  # columns of a terminal that has room for a curve in the table
_COLUMNS = {"loss": 0, "tokens/s": 0, "mfu": 110, "goodput": 120, "data wait": 135, "last save": 160}  # likewise


@dataclass
class Watched:
    """A run that is watched; one that cannot be read now has the reason."""

    workdir: Path
    run: RecordedRun | None = None
    problem: str = ""
    beats: dict[int, dict[str, Any]] = field(default_factory=dict)

    def look(self) -> None:
        """Read what is new."""
        try:
            if self.run is None:
                self.run = RecordedRun(self.workdir, RECENT)
            else:
                self.run.look()
            self.beats = heartbeats(self.workdir)
            self.problem = "" if self.run.config else "its config.json is gone"
        except UserError as error:
            self.problem = error.reason.removeprefix(f"{self.workdir}").strip("/ ")


class Watch:
    """The runs that words of the command line name; `look` brings them up to date."""

    def __init__(self, places: Sequence[str]):
        """Find them.

        Raises:
            UserError: there are none.
        """
        self._places, self._searched = places, 0.0
        self.runs: dict[Path, Watched] = {}
        self.look()
        if not self.runs:
            raise UserError("WORKDIR", f"there is no run in {', '.join(places)}", "give the workdir of a run, or a "
                            "folder with some")

    def look(self) -> None:
        """Look at every run, and now and then for new ones."""
        if not self.runs or time.monotonic() - self._searched > _SEARCH_EVERY:
            for place in self._places:
                for workdir in self._found(place):
                    self.runs.setdefault(workdir, Watched(workdir))
            self._searched = time.monotonic()
        for one in self.runs.values():
            one.look()

    @staticmethod
    def _found(place: str) -> Iterator[Path]:
        if is_url(place):
            raise UserError("WORKDIR", f"{redacted(place)} is a URL, and copies of runs do not grow while one watches",
                            "ask jaxtrain runs list or show")
        found = run_index.workdirs(place)
        for workdir in found:
            yield workdir
            if workdir == Path(place):  # a run, and not a folder with some
                return


# --------------------------------------------------------------------------------------------------------------- frames
def frame(watch: Watch, width: int, height: int, now: float | None = None) -> Any:
    """Return what rich draws of the runs on a terminal of this size."""
    now = time.time() if now is None else now
    runs = list(watch.runs.values())
    return _one(runs[0], width, height, now) if len(runs) == 1 else _table(runs, width, height, now)


def facts(one: Watched) -> JsonObject:
    """Return what is known of a run now: its state, and the newest lines of its metrics as they were written."""
    run = one.run
    if run is None or one.problem:
        return {"workdir": f"{one.workdir}", "state": "damaged", "problem": one.problem}
    account = run.account
    return {"workdir": f"{one.workdir}", "state": run.state(time.time()), "problem": "",
            "step": max(run.step, account.step if account else 0), "last_step": run.last_step,
            "metrics": {**run.steps.last}, "evaluation": {**run.evaluations.last},
            "goodput": account.goodput if account else None, "seconds": account.lived if account else None,
            "starts": len(account.incarnations) if account else 0, "checkpoints": [*run.checkpoints],
            "processes": len(one.beats), "last_event": run.events[-1] if run.events else None}


def reading(one: Watched, now: float) -> Reading:
    """Return what a panel shows of a run."""
    run = one.run
    if run is None or one.problem:
        return Reading(f"{one.workdir}", state="damaged", notes=[one.problem])
    account, state = run.account, run.state(now)
    line = {**run.steps.last}
    step = max(run.step, account.step if account else 0)
    figures = figures_of(line)
    if (loss := run_index.number(run.evaluations.last.get("eval_loss"))) is not None:
        figures["eval_loss"] = f"{loss:.4f}"
    for key in [key for key in run.results.last if key != "step"][:_RESULTS]:
        if (value := run_index.number(run.results.last[key])) is not None:
            figures[key.removeprefix("eval_")] = f"{value:.4f}"
    figures |= {unit: f"{line[unit]:,}" for unit in ("tokens", "examples") if isinstance(line.get(unit), int)}
    if account:
        figures["goodput"] = f"{account.goodput:.1%}"
        figures["ran for"] = duration(account.lived) + (
            f" in {len(account.incarnations)} starts" if len(account.incarnations) > 1 else "")
        if rate := run_index.hourly(run):
            figures["cost"] = f"${rate * account.lived / 3600:,.2f}"
    if memory := sum(filter(None, map(_memory, one.beats.values()))):
        figures["host memory"] = in_bytes(memory)
    if saved := run.checkpoints:
        figures["last save"] = f"step {saved[-1]}{_saved(one.workdir, saved[-1], now)}"
    if account and state != "running":
        figures["last sign"] = f"{age(now - run.sign)} ago"
    pace, last = run_index.number(line.get("step_time_s")), run.last_step
    left = duration((last - step) * pace) if pace and last > step and state == "running" else ""
    return Reading(f"{one.workdir}", step, last, state, left, run.steps["loss"], figures, [
        note(event) for event in run.events[-_NOTED:] if event["kind"] != "checkpoint"])


def _one(one: Watched, width: int, height: int, now: float) -> Any:
    from rich.console import Group

    processes = _processes(one, now)
    said = reading(one, now)
    if one.run and not one.problem:
        with contextlib.suppress(UserError):
            said.title += "".join(f" #{tag}" for tag in tags.of(one.workdir))
    room = height - 12 - len(processes)  # besides the frame, the bar and the figures
    rows = max(2, min(8, room // 2))
    return Group(panel(said, width, rows=rows, notes=max(1, min(8, room - rows))), *processes)


def _processes(one: Watched, now: float) -> list[Any]:
    """Return a line for each process that left a heartbeat."""
    from rich.text import Text

    if not one.beats:
        return []
    lines = []
    for process, beat in list(one.beats.items())[:_SHOWN]:
        then, quiet = run_index.number(beat.get("time")), run_index.number(beat.get("quiet_s"))
        silent = None if then is None else now - then
        ended = beat.get("phase") == "ended"
        said = f"process {process} on {beat.get('host', '?')}: {beat.get('phase', '?')}"
        said += "" if ended else f", step {beat.get('step', '?')}"
        said += f"{', heartbeat' * (not ended)} {age(silent)} ago" if silent is not None else ""
        said += f", no progress for {age(quiet)}" if quiet and quiet >= 10 and not ended else ""
        late = not ended and silent is not None and silent > 15
        lines.append(Text(plain(f"  {said}"), style="yellow" if late else "dim", no_wrap=True, overflow="ellipsis"))
    if (more := len(one.beats) - _SHOWN) > 0:
        lines.append(Text(f"  and {more} more processes", style="dim"))
    return lines


def _table(runs: Sequence[Watched], width: int, height: int, now: float) -> Any:
    from rich.table import Table
    from rich.text import Text

    said = sorted((reading(one, now) for one in runs), key=lambda one: (one.state != "running", one.title))
    common = os.path.commonpath([os.path.dirname(one.title) or "." for one in said]) if len(
        {os.path.isabs(one.title) for one in said}) == 1 else ""
    names = [name for name, least in _COLUMNS.items() if width >= least and any(name in one.figures for one in said)]
    table = Table(box=None, padding=(0, 1), width=width, show_edge=False, header_style="bold")
    table.add_column("run", no_wrap=True, overflow="ellipsis", ratio=1, min_width=12)
    for name in ["state", "step", *(["curve"] if width >= _CURVE else []), *names, "left"]:
        table.add_column(name, no_wrap=True, justify="left" if name in ("state", "curve") else "right")
    room = max(1, height - 3)
    for one in said[:room]:
        title = os.path.relpath(one.title, common) if common else one.title
        curves = [Text(curve(columns_of(one.losses, 12))[0], "cyan")] if width >= _CURVE else []
        problem = one.notes[-1] if one.state == "damaged" and one.notes else ""
        step = f"{one.step or ''}" if not one.last_step else f"{one.step:,}/{one.last_step:,}" if width >= _CURVE else (
            f"{one.step / one.last_step:.0%}")
        table.add_row(Text(plain(f"{title}{f': {problem}' if problem else ''}")),
                      Text(one.state, STYLES.get(one.state, "")), step, *curves,
                      *(Text(plain(one.figures.get(name, ""))) for name in names), one.left)
    if len(said) > room:
        table.add_row(Text(f"and {len(said) - room} more", style="dim"))
    return table


def _saved(workdir: Path, step: int, now: float) -> str:
    """Return how long ago a checkpoint was saved, as the end of a phrase."""
    try:
        return f", {age(now - (workdir / 'checkpoints' / f'{step}').stat().st_mtime)} ago"
    except OSError:
        return ""


def _memory(beat: JsonObject) -> int | None:
    """Return the bytes of this machine's memory that a process has; None: it is on another, or has ended."""
    if beat.get("host") != socket.gethostname() or beat.get("phase") == "ended":
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{beat['pid']}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def draw(watch: Watch, console: Any) -> None:
    """Draw runs again and again, until q is pressed."""
    from rich.live import Live

    with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(frame(watch, console.width, console.height), refresh=True)
            if _key(EVERY) in ("q", "Q"):
                return
            watch.look()


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """A context in which a key is read when it is pressed, without Enter, if standard input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _key(seconds: float) -> str:
    """Return the key that is pressed within this many seconds, or ""."""
    if sys.stdin.isatty() and select.select([sys.stdin], [], [], seconds)[0]:
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace")
    if not sys.stdin.isatty():
        time.sleep(seconds)
    return ""
