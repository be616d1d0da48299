"""Rows read by several threads, before they are asked for: where a row waits for a network and not for a processor."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

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
        soon = -(-self._threads // max(1, len(indices)))  # steps that keep all threads busy
        with self._lock:
            wanted = {(s, i): self._begun.pop((s, i), None) or self._pool.submit(self._read, s, i)
                      for s in range(step, step + soon + 1) for i in indices}
            for other in self._begun.values():  # of a place that was left
                other.cancel()
            now = [wanted.pop(place) if (place := (step, i)) in wanted else self._pool.submit(self._read, step, i)
                   for i in indices]
            self._begun = wanted
        try:
            return [future.result() for future in now]
        except BaseException:
            with self._lock:
                self._begun = {}
            for future in (*now, *wanted.values()):
                future.cancel()
            raise
