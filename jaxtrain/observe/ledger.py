"""The goodput ledger: assigns every second of a process to one category, and is saved every few seconds.

Each event assigns the time since the previous event to the category that was active until then, so the sum is right by
construction. The category is "step" while any step is in flight on the devices, whatever the loop does meanwhile;
otherwise it is what the loop is doing. So a wait for data that does not idle the devices costs nothing.
"""

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import jax

from jaxtrain.errors import say
from jaxtrain.observe.goodput import Account, Incarnation, account, incarnations, table

Item = TypeVar("Item")
_IMPORTED = time.monotonic()
_MOST_MARKS = 512
_END = object()


class Clock:
    """This process's clocks, which tests replace."""

    def wall(self) -> float:
        """Return seconds since 1970 by the wall clock, which may be set wrong."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds by a monotonic clock."""
        return time.monotonic()

    def boot(self) -> str:
        """Return an id of what `monotonic` counts from, equal in all processes that may compare it."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return uuid.uuid4().hex

    def age(self) -> float:
        """Return seconds since the run's process began; 0 in a notebook or a test, which do more than this run."""
        if getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "") != "jaxtrain.main":
            return 0.0
        try:
            ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
            return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
        except (OSError, ValueError, IndexError, AttributeError):
            return self.monotonic() - _IMPORTED


class Ledger:
    """The ledger of one start of the run; every process keeps one, and process 0 writes its own to disk.

    Use it as a context manager around the whole run; at the end it prints where the time of the run went.
    """

    def __init__(self, workdir: str | Path, *, stopped: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
                 every: float = 5.0, clock: Clock | None = None):
        """Start counting.

        Args:
            stopped: the exceptions of a run that was asked to stop.
            every: seconds between writes; 0: none.
        """
        self._workdir, self._stopped, self._every, self._clock = Path(workdir), stopped, every, clock or Clock()
        self._lock = threading.RLock()
        self._doing = ["init"]
        self._dispatched = self._completed = 0
        now, age = self._clock.monotonic(), self._clock.age()
        self._own = Incarnation(began=self._clock.wall() - age, tick=now - age, boot=self._clock.boot())
        self._own.seconds = {"init": age}
        self._since = now
        self._latest: list[float] | None = None  # the newest mark, not kept yet
        self._step_seconds = 0.0  # seconds of "step" when the previous step was complete
        self._listener: Callable[[float], None] = lambda seconds: None
        self._file: Path | None = None  # None until opened, and always in other processes
        self._earlier: list[Incarnation] = []
        self._base = account([])
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------------------------------------------------- booking
    @contextlib.contextmanager
    def book(self, category: str) -> Iterator[None]:
        """Assign the time in this context to a category while no step is in flight; contexts may be nested."""
        with self._lock:
            self._charge()
            self._doing.append(category)
        try:
            yield
        finally:
            with self._lock:
                self._charge()
                self._doing.pop()

    def each(self, category: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items, assigning the time it takes to get each to a category."""
        iterator = iter(items)
        while True:
            with self.book(category):
                item = next(iterator, _END)
            if item is _END:
                return
            yield item  # pyrefly: ignore[invalid-yield]

    def dispatched(self, step: int) -> None:
        """Note that a step was dispatched; until it is complete, time counts as "step"."""
        with self._lock:
            self._charge()
            self._dispatched, self._doing[0] = step, "other"

    def completed(self, step: int) -> None:
        """Note that the devices completed a step (called by the metrics thread)."""
        with self._lock:
            self._charge()
            if step > self._dispatched:
                return  # the run rolled back meanwhile
            self._completed, total = step, self._own.seconds.get("step", 0.0)
            took, self._step_seconds, self._latest = total - self._step_seconds, total, [step, total]
        self._listener(took)

    def on_step(self, listener: Callable[[float], None]) -> None:
        """Set the function called with each step's own seconds, on the metrics thread; replaces the previous one."""
        self._listener = listener

    def resumed(self, step: int) -> None:
        """Note that the run continues from this step; steps beyond it, including this process's, become lost work."""
        with self._lock:
            self._charge()
            self._pin()
            own = self._own
            if lost := own.lost(step):
                own.seconds["step"] -= lost
                own.seconds["lost_work"] = own.seconds.get("lost_work", 0.0) + lost
            own.marks = [mark for mark in own.marks if mark[0] < step] + [[step, own.seconds.get("step", 0.0)]]
            own.resumed = step if own.resumed is None else min(step, own.resumed)
            self._dispatched = self._completed = step
            self._step_seconds = own.seconds.get("step", 0.0)
            # All that was before, the gap to this start, and the steps that this start repeats.
            self._base = account([*self._earlier, dataclasses.replace(own, seconds={}, sign=own.began)])
        self.write()  # records the lost work even if this start is killed at once

    def pin(self) -> None:
        """Keep the time at which the last complete step was reached, since a later start may resume from it."""
        with self._lock:
            self._pin()

    def note_save(self, cost: float, duration: float) -> None:
        """Record what a save costs, for later starts."""
        self._own.save_cost, self._own.save_duration = cost, duration

    # ---------------------------------------------------------------------------------------------------------- results
    def now(self) -> float:
        """Return the current time of its monotonic clock."""
        return self._clock.monotonic()

    @property
    def earlier(self) -> Account:
        """The account of the run before this start."""
        return account(self._earlier)

    def seconds(self, category: str) -> float:
        """Return this process's seconds in a category so far."""
        with self._lock:
            self._charge()
            return self._own.seconds.get(category, 0.0)

    def goodput(self) -> float:
        """Return the goodput of the whole run so far."""
        with self._lock:
            self._charge()
            life = self._base.life + self._own.lived
            return (self._base.seconds["step"] + self._own.seconds.get("step", 0.0)) / life if life > 0 else 0.0

    def account(self) -> Account:
        """Return the account of the whole run so far."""
        return account([*self._earlier, self._now()])

    # ------------------------------------------------------------------------------------------------------- the files
    def open(self, last_step: int) -> None:
        """Read the earlier starts, and begin writing to the workdir (in process 0).

        A second call, as after a rollback, does nothing.
        """
        if self._own.last_step:
            return
        folder = self._workdir / "ledger"
        self._earlier = incarnations(self._workdir)
        with self._lock:
            own = self._own
            own.last_step, own.processes = last_step, jax.process_count()
            if self._earlier and self._earlier[-1].boot == own.boot:  # one process may train twice
                overlap = min(self._earlier[-1].tick + self._earlier[-1].lived - own.tick, own.seconds["init"])
                if overlap > 0:
                    own.began, own.tick = own.began + overlap, own.tick + overlap
                    own.seconds["init"] -= overlap
        if jax.process_index() != 0:
            return
        folder.mkdir(exist_ok=True)
        numbers = [int(path.stem) for path in folder.glob("[0-9]*.json")]
        self._file = folder / f"{max(numbers, default=0) + 1:04}.json"
        self.write()
        if self._every:
            self._thread = threading.Thread(target=self._keep_writing, name="ledger", daemon=True)
            self._thread.start()

    def write(self) -> None:
        """Write the file atomically; on a full disk nothing is lost, since the next write includes these seconds."""
        if self._file is None:
            return
        temporary = self._file.with_name(self._file.name + ".tmp")
        try:
            temporary.write_text(json.dumps(vars(self._now())))
            os.replace(temporary, self._file)
        except OSError:
            pass

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        self._own.ended = "finished" if kind is None else "stopped" if issubclass(kind, self._stopped) else "failed"
        self.write()
        if self._file is not None:
            say(table(self.account()))

    def _keep_writing(self) -> None:
        while not self._end.wait(self._every):
            self.write()

    def _now(self) -> Incarnation:
        with self._lock:
            self._charge()
            self._pin()
            self._own.sign = self._clock.wall()
            return dataclasses.replace(self._own, seconds=dict(self._own.seconds), marks=list(self._own.marks))

    def _charge(self) -> None:
        now = self._clock.monotonic()
        category = "step" if self._dispatched > self._completed else self._doing[-1]
        self._own.seconds[category] = self._own.seconds.get(category, 0.0) + now - self._since
        self._since = now

    def _pin(self) -> None:
        marks = self._own.marks
        if self._latest is not None and (not marks or self._latest[0] > marks[-1][0]):
            marks.append(self._latest)
        self._latest = None
        if len(marks) > _MOST_MARKS:  # older marks are thinned out and interpolated
            del marks[1:_MOST_MARKS // 2:2]
