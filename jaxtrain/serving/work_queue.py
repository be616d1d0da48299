"""The work of a training service: calls that wait for the devices, and their answers, which clients come back for.

One thread runs all work in the order in which it arrived, but for a model's calls, whose numbers say their order, and
for sampling requests of a group, which run together. Both the work that waits and the answers that nobody has fetched
yet are bounded.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.base.annotations import JsonObject
from jaxtrain.errors import UserError, say

GAP_S = 120.0  # after which a call fails whose predecessor has not arrived
KEPT_S = 900.0  # after which an answer may be forgotten that nobody has fetched: clients ask all the time


class Refused(Exception):
    """A call that is answered at once by an HTTP status and a sentence."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


@dataclass
class Answer:
    """The answer of a call, or the error that it ended with."""

    id: str
    owner: str
    size: int  # bytes of the request, until it is answered; then of the answer
    ready: threading.Event = field(default_factory=threading.Event)
    ready_at: float = 0.0
    content: JsonObject | bytes | None = None  # bytes: of a protobuf message
    error: str = ""
    category: str = "user"  # whose mistake the error is
    fetched: bool = False
    cancelled: bool = False
    held_since: float = 0.0  # it waits for a call that comes before it

    def give(self, content: JsonObject | bytes) -> None:
        """Answer."""
        self.content, self.size = content, len(content) if isinstance(content, bytes) else 256
        self._end()

    def fail(self, error: str, category: str = "user") -> None:
        """Answer with an error."""
        self.error, self.category, self.size = error, category, len(error)
        self._end()

    def _end(self) -> None:
        self.ready_at = time.monotonic()
        self.ready.set()

    @property
    def expendable(self) -> bool:
        """Whether it may be forgotten: somebody has fetched it, or nobody comes for it."""
        return self.ready.is_set() and (self.fetched or time.monotonic() - self.ready_at > KEPT_S)


@dataclass
class Work:
    """Something to be run on the devices."""

    run: Callable[[Sequence[Any]], Sequence[JsonObject | bytes]]  # items of a group -> their answers
    item: Any = None
    group: Hashable = None  # work of one group, unless it is None, runs together
    weight: int = 1  # what it counts in a group


Call = tuple[Answer, Work]


class WorkQueue:
    """Work in order, one thread that does it, and the answers."""

    def __init__(self, most: int, most_bytes: int, together: int):
        self.most, self.most_bytes, self.together = most, most_bytes, together
        self._waiting: deque[Call] = deque()
        self._held: dict[tuple[str, int], Call] = {}
        self._next: dict[str, int] = {}  # of each model, the number of the call that is to come
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="devices", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------ calls come in
    def answer(self, id: str, owner: str) -> Answer | None:
        """Return the answer, ready or not, of an owner's call; None: there is none of this name."""
        with self._changed:
            found = self._answers.get(id)
            return found if found is not None and found.owner == owner else None

    def submit(self, id: str, owner: str, size: int, work: Work, model: str = "", number: int = 0) -> Answer:
        """Take work in, unless a call of this name was taken before; return its answer.

        Args:
            id: the name of the call.
            owner: who may fetch the answer.
            size: bytes of the request.
            work: what to do.
            model: whose calls run in the order of their numbers.
            number: of the call, from 1.
        """
        with self._changed:
            if (known := self._answers.get(id)) is not None:
                if known.owner != owner:
                    raise Refused(404, f"{id} is not a call of yours")
                return known
            if model and not 0 <= number - self._next.setdefault(model, 1) <= self.most:
                raise Refused(400, f"seq_id {number} of {model} is not the next one, which is {self._next[model]}")
            self._check_room(size)
            answer = self._answers[id] = Answer(id, owner, size)
            if not model:
                self._waiting.append((answer, work))
            else:
                self._held[model, number] = answer, work
                answer.held_since = time.monotonic()
                self._release(model)
            self._changed.notify_all()
            return answer

    def _check_room(self, size: int) -> None:
        """Refuse a call that there is no room for, after answers that were fetched have been forgotten."""
        if self._stopping:
            raise Refused(503, "the server is stopping")
        late = time.monotonic() - GAP_S
        for answer, _ in [call for _, call in sorted(self._held.items()) if call[0].held_since < late]:
            self._give_up(answer)  # whose client may be gone, and never asks
        waiting = len(self._waiting) + len(self._held)
        if waiting >= self.most:
            raise Refused(429, f"{waiting} calls wait already (--queue={self.most}); try again later")
        total = sum(one.size for one in self._answers.values()) + size
        for id in [id for id, one in self._answers.items() if one.expendable]:
            if len(self._answers) < 2 * self.most and total <= self.most_bytes:
                break
            total -= self._answers.pop(id).size
        if total > self.most_bytes or len(self._answers) >= 4 * self.most:
            raise Refused(429, f"calls and answers that nobody has fetched take {total:,} bytes, above "
                          f"--queue_mib={self.most_bytes // 2**20}; fetch answers, or try again later")

    def _release(self, model: str) -> None:
        """Let calls of a model run whose turn it is."""
        while (call := self._held.pop((model, self._next[model]), None)) is not None:
            call[0].held_since = 0.0
            self._waiting.append(call)
            self._next[model] += 1

    def wait(self, answer: Answer, seconds: float) -> bool:
        """Wait until it is ready, for so long at most; say whether it is."""
        since = answer.held_since
        if since and time.monotonic() - since > GAP_S:
            self._give_up(answer)
        return answer.ready.wait(seconds)

    def _give_up(self, answer: Answer) -> None:
        """Fail a call whose predecessor never came, and all of its model before it in the order."""
        with self._changed:
            found = next((key for key, call in self._held.items() if call[0] is answer), None)
            if found is None:
                return
            model, number = found
            answer.fail(f"call {self._next[model]} of {model} never arrived, which comes before this one, {number}; "
                        "make a new training client of the last saved state")
            del self._held[found]
            self._next[model] = max(self._next[model], number + 1)
            self._release(model)
            self._changed.notify_all()

    def forget(self, model: str) -> None:
        """Fail all calls of a model that are held, and forget its order."""
        with self._changed:
            for key in [key for key in self._held if key[0] == model]:
                self._held.pop(key)[0].fail(f"{model} was unloaded")
            self._next.pop(model, None)

    @property
    def length(self) -> int:
        """The number of calls that wait."""
        return len(self._waiting) + len(self._held)

    # ---------------------------------------------------------------------------------------------- the thread's side
    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if self._stopping:
                    return
                calls = self._next_together()
            self._run(calls)

    def _next_together(self) -> list[Call]:
        """Take the next work, and what waits of its group."""
        found = [self._waiting.popleft()]
        first = found[0][1]
        room = self.together - first.weight
        for call in [call for call in self._waiting if first.group is not None and call[1].group == first.group]:
            if call[1].weight <= room:
                found.append(call)
                room -= call[1].weight
                self._waiting.remove(call)
        return found

    def _run(self, calls: list[Call]) -> None:
        for answer, _ in calls:
            if answer.cancelled:
                answer.fail("the call was cancelled")
        if not (calls := [call for call in calls if not call[0].cancelled]):
            return
        try:
            found = calls[0][1].run([work.item for _, work in calls])
            for (answer, _), content in zip(calls, found, strict=True):
                answer.give(content)
        except (UserError, Refused) as mistake:
            for answer, _ in calls:
                answer.fail(f"{mistake}")
        except Exception as error:  # the server goes on: other models are not concerned
            say(f"error: {type(error).__name__}: {error}")
            for answer, _ in calls:
                if not answer.ready.is_set():
                    answer.fail(f"{type(error).__name__} in the server: {f'{error}'[:500]}", "server")

    def close(self) -> None:
        """End the work that runs, and fail what waits."""
        with self._changed:
            self._stopping = True
            left = [*self._waiting, *self._held.values()]
            self._waiting.clear()
            self._held.clear()
            self._changed.notify_all()
        for answer, _ in left:
            answer.fail("the server is stopping; nothing that was saved is lost", "server")
        self._thread.join()
