"""Read rows ahead on several threads, for data where reading waits for a network rather than a processor."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice

import numpy as np

Rows = dict[str, np.ndarray]


class ReadAhead:
    """Returns rows as `read(step, indices)` would, and starts to read those of the next steps."""

    def __init__(self, read: Callable[[int, np.ndarray], Rows], threads: int):
        self._read, self._threads = read, threads
        self._pool = ThreadPoolExecutor(threads, "rows")
        self._begun: dict[tuple[int, int], Future[Rows]] = {}
        self._lock = threading.Lock()

    def rows(self, step: int, indices: Sequence[int] | np.ndarray) -> Rows:
        """Return the rows of a step in the order of `indices`."""
        indices = [int(index) for index in indices]
        if not indices:
            return self._read(step, np.zeros(0, np.int64))
        now = [(step, index) for index in indices]
        soon = list(islice(((later, index) for later in count(step + 1) for index in indices), self._threads))
        with self._lock:
            begun = {place: self._begun.pop(place, None) or self._pool.submit(self._one, *place)
                     for place in (*now, *soon)}
            for other in self._begun.values():  # of steps that were skipped
                other.cancel()
            self._begun = {place: begun[place] for place in soon}
        try:
            rows = [begun[place].result() for place in now]
        except BaseException:
            with self._lock:
                self._begun = {}
            for future in begun.values():
                future.cancel()
            raise
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def _one(self, step: int, index: int) -> Rows:
        return self._read(step, np.array([index]))
