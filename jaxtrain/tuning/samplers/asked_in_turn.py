"""Questions to a sampler, which a thread beside the steps has answered in order."""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from jaxtrain.hub.generate import Generated
from jaxtrain.tuning.samplers.awaited import Awaited
from jaxtrain.tuning.samplers.completions import Answering

Record = Callable[[list[Generated]], None]
W = TypeVar("W")  # the weights of a kind of sampler


class AnyWeights(Protocol):
    """The weights after a step, where a sampler has them."""

    @property
    def step(self) -> int:
        """The step."""
        ...

    @property
    def version(self) -> str:
        """The step, and a hash of the weights."""
        ...


@dataclass(frozen=True)
class Job(Generic[W]):
    """So many answers that are wanted by these weights."""

    many: int
    asking: Callable[[Answering], list[Generated]]
    weights: W
    record: Record
    future: "Future[list[Generated]]"


class Stopped(Exception):
    """Raised where nothing is wanted any more."""


class AskedInTurn(ABC, Generic[W]):
    """Answers that one thread has made, those that were asked for first before the others."""

    patience_s: ClassVar[float | None] = 5.0  # for what is under way to end when it is no longer wanted; None: any

    def __init__(self):
        self._stop, self._queue = threading.Event(), queue.SimpleQueue[Job[W] | None]()
        self._thread: threading.Thread | None = None
        self._fields: dict[str, float] = {}

    @abstractmethod
    def _made(self, job: Job[W], stop: threading.Event) -> list[Generated]:
        """Return all answers of a job; raise `Stopped` soon after the event."""

    def ask(self, many: int, asking: Callable[[Answering], list[Generated]], weights: W, record: Record) -> Awaited:
        """Have so many answers made by these weights; returns at once.

        Args:
            many: the number of answers.
            asking: makes them by what it is given, on the thread.
            weights: those that answer.
            record: called with the answers when all are there, before anyone gets them.
        """
        future: Future[list[Generated]] = Future()
        self._queue.put(Job(many, asking, weights, record, future))
        if self._thread is None:
            # A daemon: Python would wait for any other thread at its exit, however long the answers take.
            self._thread = threading.Thread(target=self._work, args=(self._queue, self._stop), name="sampler",
                                            daemon=True)
            self._thread.start()
        return Awaited(many, future)

    def stop(self) -> None:
        """Cancel what is outstanding; return at once."""
        self._stop.set()
        self._queue.put(None)

    def forget(self) -> None:
        """Forget what was asked for, and end the thread."""
        self.stop()
        if self._thread is not None:
            self._thread.join(self.patience_s)
        self._stop, self._queue, self._thread = threading.Event(), queue.SimpleQueue(), None

    def pop_fields(self) -> dict[str, float]:
        """Return what was measured since the last call."""
        found, self._fields = self._fields, {}
        return found

    def _work(self, asked: "queue.SimpleQueue[Job[W] | None]", stop: threading.Event) -> None:
        while (job := asked.get()) is not None:
            try:
                if stop.is_set():
                    raise Stopped
                answers = self._made(job, stop)
                if stop.is_set():
                    raise Stopped
                job.record(answers)
                job.future.set_result(answers)
            except Stopped:
                job.future.cancel()
            except BaseException as error:  # the step that needs the answers raises it
                job.future.set_exception(error)

    def _add(self, name: str, value: float) -> None:
        self._fields[name] = self._fields.get(name, 0) + value

    def _took(self, seconds: float, tokens: int) -> None:
        """Add what a job took, and how many tokens were drawn in that time."""
        self._add("rollout_s", seconds)
        self._fields["rollout_tokens_per_s"] = tokens / max(seconds, 1e-9)
