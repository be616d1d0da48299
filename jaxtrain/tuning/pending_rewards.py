"""Rewards that are computed beside the steps: threads ask the scorer, and the step that needs them collects them."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

Records = Sequence[Mapping[str, Any]]
Scores = list[list[float]]  # those of each scorer
Score = Callable[[Sequence[str], Records], Scores]  # of answers, given their prompts' records
PATIENCE_S = 5.0  # for a scorer to return when its answer is no longer wanted


class PendingRewards:
    """The rewards that one process has asked for, in the order in which it will collect them."""

    def __init__(self, score: Score, threads: int = 1):
        """`threads`: the answers of how many steps are scored at once."""
        self._score, self._count = score, threads
        self._asked: dict[int, Future[tuple[Scores, float]]] = {}
        self._queue: queue.SimpleQueue[tuple[Future, Sequence[str], Records] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def ask(self, step: int, answers: Sequence[str], records: Records) -> None:
        """Have the answers of a step scored; returns at once."""
        self._asked[step] = Future()
        self._queue.put((self._asked[step], answers, records))
        if len(self._threads) < self._count:
            # A daemon: Python would wait for any other thread at its exit, however long the scorer takes.
            thread = threading.Thread(target=self._work, args=(self._queue,), name="rewards", daemon=True)
            self._threads.append(thread)
            thread.start()

    def collect(self, step: int, answers: Sequence[str], records: Records) -> tuple[Scores, float]:
        """Return the rewards of a step and the scorer's seconds, or raise what the scorer raised.

        Waits for what was asked for; otherwise the scorer is asked now, on the caller's thread.
        """
        return self._asked.pop(step).result() if step in self._asked else self._timed(answers, records)

    def forget(self) -> None:
        """Forget what was asked for and end the threads; one whose scorer does not return is left behind."""
        for future in self._asked.values():
            future.cancel()
        self._asked = {}
        until = time.monotonic() + PATIENCE_S
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._queue, self._threads = queue.SimpleQueue(), []

    def _work(self, asked: queue.SimpleQueue) -> None:
        while (item := asked.get()) is not None:
            future, answers, records = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._timed(answers, records))
            except BaseException as error:  # such as SystemExit in a user's function: the step that collects raises it
                future.set_exception(error)

    def _timed(self, answers: Sequence[str], records: Records) -> tuple[Scores, float]:
        began = time.perf_counter()
        return self._score(answers, records), time.perf_counter() - began
