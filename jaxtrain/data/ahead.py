"""Rows read by several threads, before they are asked for: where a row waits for a network and not for a processor."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice

import numpy as np

Row = dict[str, np.ndarray]


class Ahead:
    """`rows(step, indices)` as `read(step, index)` gives them; those of the next steps are begun meanwhile."""

    def __init__(self, read: Callable[[int, int], Row], threads: int):
        self._read, self._threads = read, threads
        self._pool = ThreadPoolExecutor(threads, "rows")
        self._begun: dict[tuple[int, int], Future[Row]] = {}
        self._lock = threading.Lock()

    def rows(self, step: int, indices: Sequence[int]) -> list[Row]:
        """In the order of `indices`."""
        now = [(step, index) for index in indices]
        soon = list(islice(((later, index) for later in count(step + 1) for index in indices), self._threads))
        with self._lock:
            begun = {place: self._begun.pop(place, None) or self._pool.submit(self._read, *place)
                     for place in (*now, *soon)}
            for other in self._begun.values():  # of a step that nobody came to
                other.cancel()
            self._begun = {place: begun[place] for place in soon}
        try:
            return [begun[place].result() for place in now]
        except BaseException:
            with self._lock:
                self._begun = {}
            for future in begun.values():
                future.cancel()
            raise
