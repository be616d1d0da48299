"""The account of a run's time over all its starts: its categories, goodput, and ETTR."""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from jaxtrain.files.bounded_files import read_json

CATEGORIES = {  # in the order of the table
    "step": "steps that count",
    "data_wait": "waiting for batches",
    "checkpoint": "held up by saves",
    "eval": "evaluations",
    "exchange": "exchanges with other islands",
    "init": "starting up, before the first step",
    "compile": "compiling",
    "restore": "reading checkpoints",
    "lost_work": "steps done again, or never saved",
    "restart_gap": "from a failure's last sign of life to the next start",
    "other": "after the last step",
    "idle": "between a clean end and the next start",
}
_NUMBER = int | float
_FORM = {"began": _NUMBER, "seconds?": dict.fromkeys((f"{name}?" for name in CATEGORIES), _NUMBER), "ended?": str,
         "resumed?": int | None, "reached?": (int, _NUMBER), "last_step?": int}
_LARGEST = 2**53  # a float has whole numbers up to here; no second or step is beyond
_CLEAN = ("finished", "stopped")


@dataclass
class Incarnation:
    """One start of the run and how it went, as recorded by process 0 in `ledger/NNNN.json`."""

    began: float  # wall clock
    seconds: dict[str, float] = field(default_factory=dict)  # category -> seconds since the start; they cover all of it
    ended: str = ""  # "finished", "stopped" (by a signal), "failed"; "": not yet, or killed
    resumed: int | None = None  # the lowest step it resumed from; None: it did not get that far
    reached: tuple[int, float] = (0, 0.0)  # the last complete step, and the seconds of "step" when it was complete
    last_step: int = 0  # last step of the whole run

    def __post_init__(self):
        self.seconds = dict.fromkeys(CATEGORIES, 0.0) | self.seconds

    @property
    def sign(self) -> float:
        """The last heartbeat of this start: the wall clock at its beginning, plus the seconds of a monotonic clock."""
        return self.began + sum(self.seconds.values())

    def lost(self, resumed: int) -> float:
        """Return the seconds of its steps that are repeated by a start that resumed from this step.

        Its complete steps count as equally long; what it spent after the last of them is lost with it.
        """
        step, seconds = self.reached
        if self.resumed is None or resumed > step:
            return 0.0
        kept = seconds * max(0, resumed - self.resumed) / max(1, step - self.resumed)
        return self.seconds["step"] - kept


@dataclass(frozen=True)
class Account:
    """The time of a run over all its starts."""

    seconds: dict[str, float]  # every category; the sum is the time from the first start to the last sign of life
    incarnations: Sequence[Incarnation]
    failures: int  # starts before the last one that ended other than by a signal or at the last step

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
        return self.life - self.seconds["restart_gap"]

    @property
    def step(self) -> int:
        """The last step reached."""
        return next((one.reached[0] for one in reversed(self.incarnations) if one.resumed is not None), 0)

    @property
    def left(self) -> float | None:
        """Estimated seconds to the last step at the pace so far, including failures; None if there is no pace yet."""
        done = self.step - min((one.resumed for one in self.incarnations if one.resumed is not None), default=0)
        return max(0, self.incarnations[-1].last_step - self.step) * self.life / done if done > 0 else None


def account(incarnations: Sequence[Incarnation]) -> Account:
    """Add up the starts of a run, given in order."""
    starts = settled(incarnations)
    total = {category: sum(seconds[category] for seconds in starts) for category in CATEGORIES}
    for one, after in itertools.pairwise(incarnations):  # between machines the clocks may disagree
        total["idle" if one.ended in _CLEAN else "restart_gap"] += max(0.0, after.began - one.sign)
    return Account(total, incarnations, sum(one.ended not in _CLEAN for one in incarnations[:-1]))


def settled(incarnations: Sequence[Incarnation]) -> list[dict[str, float]]:
    """Return the seconds of each start by category, with the steps that a later start did again as lost work."""
    found, resumed = [], None
    for one in reversed(incarnations):
        lost = 0.0 if resumed is None else one.lost(resumed)
        found.append(one.seconds | {"step": one.seconds["step"] - lost,
                                    "lost_work": one.seconds["lost_work"] + lost})
        if one.resumed is not None:
            resumed = one.resumed if resumed is None else min(resumed, one.resumed)
    return found[::-1]


def incarnations(workdir: str | Path) -> list[Incarnation]:
    """Read all recorded starts of a run; a damaged file is skipped, and its time counts as a gap."""
    known, found = {field_.name for field_ in fields(Incarnation)}, []
    for path in sorted(Path(workdir, "ledger").glob("[0-9]*.json")):
        with contextlib.suppress(OSError, ValueError, OverflowError):
            one = Incarnation(**{key: value for key, value in read_json(path, _FORM).items() if key in known})
            numbers = one.sign, one.last_step, *one.reached, one.resumed or 0
            found += [one] if all(abs(number) < _LARGEST for number in numbers) else []
    return found


def table(life: Account) -> str:
    """Return the account as a table for people."""
    whole, starts = sum(life.seconds.values()), len(life.incarnations)
    lines = [f"where {duration(whole)} went ({starts} start{'s' * (starts != 1)}, {life.failures} failed):"]
    for category, meaning in CATEGORIES.items():
        if (seconds := life.seconds[category]) >= 0.05:  # of less, a row would have zeros only
            share = f"{seconds / life.life:6.1%}" if category != "idle" and life.life > 0 else "     -"
            lines.append(f"  {category:<11} {duration(seconds):>10} {share}  {meaning}")
    last = life.incarnations[-1]
    ahead = f"; step {life.step} of {last.last_step}"
    if life.left and last.ended != "finished":
        ahead += f", about {duration(life.left)} to go"
    productive = f"goodput {life.goodput:.1%} (steps), ETTR {life.ettr:.1%} (and batches, saves, evaluations)"
    return "\n".join([*lines, productive + ahead])


def duration(seconds: float) -> str:
    """Return a duration as text, such as `3:05 min`; one of 100 hours or more in days."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds >= 360_000:
        return f"{seconds / 86400:.1f} days"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"
