"""Account for a run's time across restarts: what share of it trained.

    jaxtrain goodput WORKDIR

`ledger.py` writes the files that are added up here, one for each start of the run.
"""

import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.flags import command, parser_of

CATEGORIES = {  # in the order of the table
    "step": "steps that count",
    "data_wait": "waiting for batches",
    "checkpoint": "held up by saves",
    "eval": "evaluations",
    "init": "from a process's start to its first step, less what follows",
    "compile": "compiling",
    "restore": "reading checkpoints",
    "lost_work": "steps done again, or never saved",
    "restart_gap": "from a failure's last sign of life to the next start",
    "other": "after the last step",
    "idle": "between a clean end and the next start",
}
_CLEAN = ("finished", "stopped")


@dataclass
class Incarnation:
    """One start of the run and how it went, as recorded by process 0 in `ledger/NNNN.json`."""

    began: float  # wall clock
    tick: float  # monotonic clock
    boot: str  # id of the machine's boot, from which `tick` counts
    seconds: dict[str, float] = field(default_factory=dict)  # category -> seconds since the start; they cover all of it
    sign: float = 0.0  # wall clock when this was written: its last sign of life
    ended: str = ""  # "finished", "stopped" (by a signal), "failed"; "": not yet, or killed
    resumed: int | None = None  # the lowest step it resumed from; None: it did not get that far
    marks: list[list[float]] = field(default_factory=list)  # [step, seconds of "step" when it was complete], ascending
    last_step: int = 0  # last step of the whole run
    processes: int = 1
    save_cost: float | None = None  # seconds of training time that a save costs
    save_duration: float | None = None  # seconds until a save is on disk

    @property
    def lived(self) -> float:
        """Seconds from its start to its last sign of life."""
        return sum(self.seconds.values())

    def lost(self, resumed: int) -> float:
        """Return the seconds of its steps that are repeated by a start that resumed from this step."""
        if not self.marks or resumed > self.marks[-1][0]:
            return 0.0
        steps, seconds = zip(*self.marks, strict=True)
        kept = float(np.interp(resumed, steps, seconds)) if resumed >= steps[0] else 0.0
        return max(0.0, self.seconds.get("step", 0.0) - kept)


@dataclass(frozen=True)
class Account:
    """The time of a run over all its starts."""

    seconds: dict[str, float]  # every category; the sum is the time from the first start to the last sign of life
    incarnations: Sequence[Incarnation]
    failures: int  # starts that ended other than by a signal or at the last step
    clock_moved: float  # total adjustment of the wall clock, by which its readings differ from the sum

    @property
    def life(self) -> float:
        """Seconds of the run's life, except those in which it was deliberately not running."""
        return sum(self.seconds.values()) - self.seconds["idle"]

    @property
    def goodput(self) -> float:
        """The share of its life spent on steps that count."""
        return self.seconds["step"] / self.life if self.life > 0 else 0.0

    @property
    def ettr(self) -> float:
        """Effective training time ratio: like goodput, but counts data waits, saves and evaluations as productive."""
        productive = sum(self.seconds[category] for category in ("step", "data_wait", "checkpoint", "eval"))
        return productive / self.life if self.life > 0 else 0.0

    @property
    def lived(self) -> float:
        """Seconds in which a process of the run existed."""
        return sum(one.lived for one in self.incarnations)

    @property
    def step(self) -> int:
        """The last step reached."""
        return next((int(one.marks[-1][0]) for one in reversed(self.incarnations) if one.marks), 0)

    @property
    def left(self) -> float | None:
        """Estimated seconds to the last step at the pace so far, including failures; None if there is no pace yet."""
        trained = [one for one in self.incarnations if one.resumed is not None]
        done = self.step - min((one.resumed or 0 for one in trained), default=0)
        if not trained or done <= 0:
            return None
        once = sum(trained[0].seconds.get(category, 0.0) for category in ("init", "compile", "restore"))
        return max(0, self.incarnations[-1].last_step - self.step) * (self.life - once) / done


def account(incarnations: Sequence[Incarnation]) -> Account:
    """Add up the starts of a run, given in order."""
    total = dict.fromkeys(CATEGORIES, 0.0)
    moved, resumed = 0.0, None
    for one in reversed(incarnations):
        for category, seconds in one.seconds.items():
            total[category] += seconds
        moved += one.sign - one.began - one.lived
        if resumed is not None:
            lost = one.lost(resumed)
            total["step"] -= lost
            total["lost_work"] += lost
        if one.resumed is not None:
            resumed = one.resumed if resumed is None else min(resumed, one.resumed)
    for one, after in itertools.pairwise(incarnations):
        gap = between(one, after)
        total["idle" if one.ended in _CLEAN else "restart_gap"] += gap
        moved += after.began - one.sign - gap
    failures = sum(one.ended not in _CLEAN for one in incarnations[:-1])
    return Account(total, incarnations, failures, moved)


def between(one: Incarnation, after: Incarnation) -> float:
    """Return the seconds from the last sign of life of one start to the next start.

    If the machine was not rebooted in between, the monotonic clock gives them; otherwise the wall clocks do, with
    negative values counted as zero.
    """
    gap = after.tick - one.tick - one.lived if one.boot == after.boot else after.began - one.sign
    return max(0.0, gap)


def incarnations(workdir: str | Path) -> list[Incarnation]:
    """Read all recorded starts of a run; a damaged file is skipped, and its time counts as a gap."""
    known, found = {field_.name for field_ in fields(Incarnation)}, []
    for path in sorted(Path(workdir, "ledger").glob("[0-9]*.json")):
        try:
            found.append(Incarnation(**{k: v for k, v in json.loads(path.read_text()).items() if k in known}))
        except (OSError, ValueError, TypeError, AttributeError):
            continue
    return found


def table(life: Account) -> str:
    """Return the account as a table for people."""
    whole = sum(life.seconds.values())
    starts = len(life.incarnations)
    lines = [f"where {duration(whole)} went ({starts} start{'s' * (starts != 1)}, {life.failures} failed):"]
    for category, meaning in CATEGORIES.items():
        if seconds := life.seconds[category]:
            share = f"{seconds / life.life:6.1%}" if category != "idle" and life.life > 0 else "     -"
            lines.append(f"  {category:<11} {duration(seconds):>10} {share}  {meaning}")
    last = life.incarnations[-1]
    ahead = f"; step {life.step} of {last.last_step}"
    if life.left and last.ended != "finished":
        ahead += f", about {duration(life.left)} to go"
    lines.append(f"goodput {life.goodput:.1%}, ETTR {life.ettr:.1%}{ahead}")
    if abs(life.clock_moved) > 1:
        lines.append(f"the wall clock was set by {life.clock_moved:+,.0f} s, which is not included above")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Return a duration as text, such as `3:05 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


@command()
def main(argv: list[str] | None = None) -> None:
    """Print the table of a workdir, as of the run's last sign of life."""
    parser = parser_of("goodput", __doc__)
    parser.add_argument("workdir", metavar="WORKDIR", help="the workdir of the run")
    workdir = parser.parse_args(argv).workdir
    found = incarnations(workdir)
    if not found:
        raise UserError("WORKDIR", f"{workdir} has no ledger", "give the workdir of a run that has begun")
    print(table(account(found)))
    if not found[-1].ended:
        print(f"last sign of life {duration(max(0.0, time.time() - found[-1].sign))} ago: it runs, or it was killed")


if __name__ == "__main__":
    sys.exit(main())
