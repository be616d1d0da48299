"""The slots of a host in an elastic run: slots that keep failing rest for a while, and the user may ask for fewer."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jaxtrain.files.bounded_files import read


@dataclass
class SlotPool:
    """The slots of a host, numbered from 0 to `slots` - 1; with `minimum` equal to `slots` all are always used."""

    slots: int
    minimum: int
    fits: Callable[[int], bool]  # whether a mesh fits this number of processes
    lost_after: int = 2
    rest: float = 600.0  # seconds that a lost slot stays out; deaths further apart are not consecutive
    clock: Callable[[], float] = time.monotonic
    order: int | None = None  # how many processes the user wants
    lost: dict[int, float] = field(default_factory=dict)  # slot -> when it was lost
    _row: dict[int, tuple[int, float]] = field(default_factory=dict)  # slot -> consecutive deaths, time of the last

    @property
    def elastic(self) -> bool:
        """Whether the number of processes may change."""
        return self.minimum < self.slots

    def died(self, slot: int) -> bool:
        """Record that this slot died first; return whether it is now lost."""
        now = self.clock()
        count, last = self._row.get(slot, (0, now))
        count = count + 1 if now - last < self.rest else 1
        self._row = {slot: (count, now)}  # consecutive only: another slot's death starts a new count
        if not self.elastic or count < self.lost_after:
            return False
        self.lost[slot] = now
        return True

    def ask(self, number: int) -> None:
        """Set the number of processes the user wants; asking for more than are available brings lost slots back."""
        self.order = number
        if number > self.slots - len(self.lost):
            self._take_back(list(self.lost))

    def wanted(self) -> list[int]:
        """Return the slots to use now: as many as are asked for, are not lost, and fit a mesh."""
        self._take_back([slot for slot, since in self.lost.items() if self.clock() - since >= self.rest])
        if self.slots - len(self.lost) < self.minimum:
            self._take_back(list(self.lost))  # nothing is left to lose
        healthy = list(range(self.slots))
        if self.lost:
            healthy = [slot for slot in healthy if slot not in self.lost]
        most = min(len(healthy), self.order or self.slots)
        for count in range(most, self.minimum - 1, -1):
            if count == self.slots or self.fits(count):
                return healthy[:count]
        self._take_back(list(self.lost))
        return list(range(self.slots))

    def _take_back(self, slots: list[int]) -> None:
        for slot in slots:
            del self.lost[slot]
            self._row[slot] = (self.lost_after - 1, self.clock())  # after one more death soon it rests again


class Order:
    """WORKDIR/processes: a file in which the user writes how many processes to use."""

    def __init__(self, path: Path, least: int, most: int, complain: Callable[[str], None]):
        self._path, self._least, self._most, self._complain = path, least, most, complain
        self._seen = self._text()  # ignores a number left from an earlier run

    def new(self) -> int | None:
        """Return the number in the file, once for each time it is written, or None."""
        text = self._text()
        if text == self._seen or not text:
            return None
        self._seen = text
        try:
            number = int(text[0])
        except ValueError:
            number = 0
        if self._least <= number <= self._most:
            return number
        self._complain(f"{self._path}: {text[0]!r} is not a number from {self._least} to {self._most} "
                       "(--min_processes to --processes)")
        return None

    def _text(self) -> tuple[str, int] | None:
        try:
            text = read(self._path, 2**10).decode(errors="replace").strip()
            return (text, self._path.stat().st_mtime_ns) if text else None
        except OSError:
            return None
