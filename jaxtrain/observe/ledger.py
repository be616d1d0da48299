"""The goodput ledger: assigns every second of a process to one category, and is saved every few seconds.

Each event assigns the time since the previous event to the category that was active until then, so the sum is right by
construction. The category is "step" while any step is in flight on the devices, whatever the loop does meanwhile;
otherwise it is what the loop is doing. So a wait for data that does not idle the devices costs nothing.
"""

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import jax

from jaxtrain.errors import say
from jaxtrain.files import atomic_files
from jaxtrain.observe.goodput import Account, Incarnation, account, incarnations, table

Item = TypeVar("Item")
HOST = "jaxtrain:"  # before the names of categories in traces of JAX's profiler
_END = object()


class Ledger:
    """The ledger of one start of the run; every process keeps one, and process 0 writes its own to disk.

    Use it as a context manager around the whole run; at the end it prints where the time of the run went.
    """

    def __init__(self, workdir: str | Path, *, stopped: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
                 every: float = 5.0, now: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time):
        """Start counting.

        Args:
            stopped: the exceptions of a run that was asked to stop.
            every: seconds between writes; 0: none.
            now: the clock that counts.
            wall: the clock that dates the start of the run, in seconds since 1970.
        """
        self._workdir, self._stopped, self._every, self.now = Path(workdir), stopped, every, now
        self._lock, self._end = threading.RLock(), threading.Event()
        self._doing, self.ending = ["init"], ""  # the text is printed below the table, if the run has ended well
        self._dispatched = self._completed = 0
        self._own = Incarnation(began=wall())
        self._since = now()
        self._file: Path | None = None  # None until opened, and always in other processes
        self._earlier: list[Incarnation] = []
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------------------------------------------------- booking
    @contextlib.contextmanager
    def book(self, category: str) -> Iterator[None]:
        """Assign the time in this context to a category while no step is in flight; contexts may be nested.

        A trace of JAX's profiler, if one is taken, shows it too.
        """
        with self._lock:
            self._charge()
            self._doing.append(category)
        try:
            with jax.profiler.TraceAnnotation(f"{HOST}{category}"):
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
            if step <= self._dispatched:  # otherwise the run rolled back meanwhile
                self._completed, self._own.reached = step, (step, self._own.seconds["step"])

    def resumed(self, step: int) -> None:
        """Note that the run continues from this step; steps beyond it, including this process's, become lost work."""
        with self._lock:
            self._charge()
            own = self._own
            lost = own.lost(step)
            own.seconds["step"] -= lost
            own.seconds["lost_work"] += lost
            own.resumed = step if own.resumed is None else min(step, own.resumed)
            own.reached = step, own.seconds["step"]
            self._dispatched = self._completed = step
        self.write()  # records the lost work even if this start is killed at once

    # ---------------------------------------------------------------------------------------------------------- results
    @property
    def reached(self) -> tuple[int, float]:
        """The last complete step, and this process's seconds of steps until it was."""
        return self._own.reached

    @property
    def began(self) -> float:
        """The time at which this start of the run began, in seconds since 1970."""
        return self._own.began

    def goodput(self) -> float:
        """Return the goodput of the whole run so far."""
        return self.account().goodput

    def account(self) -> Account:
        """Return the account of the whole run so far."""
        return account([*self._earlier, self.so_far()])

    def so_far(self) -> Incarnation:
        """Return the record of this start, up to now."""
        with self._lock:
            self._charge()
            return dataclasses.replace(self._own, seconds=dict(self._own.seconds))

    # ------------------------------------------------------------------------------------------------------- the files
    def open(self, last_step: int) -> None:
        """Read the earlier starts and begin writing to the workdir, both in process 0.

        A second call, as after a rollback, does nothing.
        """
        if self._own.last_step or jax.process_index() != 0:
            return
        self._own.last_step, self._earlier = last_step, incarnations(self._workdir)
        folder = self._workdir / "ledger"
        with contextlib.suppress(OSError):  # without the folder the run goes on, and its time is not recorded
            folder.mkdir(exist_ok=True)
        numbers = [int(path.stem) for path in folder.glob("[0-9]*.json") if path.stem.isdecimal()]
        number = max(numbers, default=0) + 1
        with contextlib.suppress(OSError):
            while not _made(folder / f"{number:04}.json"):  # another process made it, where locks do not work
                number += 1
        self._file = folder / f"{number:04}.json"
        self.write()
        if self._every:
            self._thread = threading.Thread(target=self._keep_writing, name="ledger", daemon=True)
            self._thread.start()

    def write(self, ended: str = "") -> None:
        """Write the file atomically, and how this start ended, once it did ("finished", "stopped" or "failed").

        On a full disk nothing is lost, since the next write includes these seconds."""
        self._own.ended = ended or self._own.ended
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)  # it may have been deleted
            atomic_files.write(self._file, json.dumps(vars(self.so_far())))

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        self.write("finished" if kind is None else "stopped" if issubclass(kind, self._stopped) else "failed")
        ended = kind is None and jax.process_index() == 0
        for text in filter(None, (self._file and table(self.account()), ended and self.ending)):
            say(text)

    def _keep_writing(self) -> None:
        while not self._end.wait(self._every):
            self.write()

    def _charge(self) -> None:
        now = self.now()
        category = "step" if self._dispatched > self._completed else self._doing[-1]
        self._own.seconds[category] += now - self._since
        self._since = now


def _made(path: Path) -> bool:
    """Make an empty file; return False if it exists already."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
