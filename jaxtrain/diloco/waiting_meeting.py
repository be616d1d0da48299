"""Calls to the meeting place on a thread, polled every second, so that an island can be stopped while it waits."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from jaxtrain.diloco.meeting import Entry, Meeting, Offer, Unanswered

PATIENCE_S = 1.0  # beyond what the call itself may wait


class WaitingMeeting:
    """Makes the calls of one thread on others; raises `Unanswered` for one that goes on.

    What an island that stops no longer waits for may still arrive: made again by the resumed island, it does nothing.
    """

    def __init__(self, meeting: Meeting):
        """Call a meeting that any thread may use."""
        self._meeting = meeting
        self._asked: tuple[Any, ...] = ()
        self._answer: Future[Any] = Future()

    def begin(self, offer: Offer, content: bytes) -> None:
        """Begin to make an offer; while it is under way, nothing else may be asked."""
        self._start("offer", offer, content)

    def offer(self, offer: Offer, content: bytes) -> None:
        """Offer progress, as `Meeting` says."""
        self._ask(0.0, "offer", offer, content)

    def entries(self, after: int, wait: float) -> Sequence[Entry]:
        """Return the entries, as `Meeting` says."""
        return self._ask(wait, "entries", after, wait)

    def content(self, sha256: str) -> bytes:
        """Return a content, as `Meeting` says."""
        return self._ask(0.0, "content", sha256)

    def put_snapshot(self, position: int, content: bytes) -> None:
        """Keep a snapshot, as `Meeting` says."""
        self._ask(0.0, "put_snapshot", position, content)

    def snapshot(self) -> tuple[int, bytes] | None:
        """Return the newest snapshot, as `Meeting` says."""
        return self._ask(0.0, "snapshot")

    def _ask(self, seconds: float, *asked: object) -> Any:
        if self._asked != asked:
            self._start(*asked)
        if not wait([self._answer], seconds + PATIENCE_S).done:
            raise Unanswered(asked[0])
        self._asked = ()
        return self._answer.result()

    def _start(self, *asked: object) -> None:
        self._asked, self._answer = asked, Future()
        threading.Thread(target=self._call, args=(self._answer, *asked), name="islands-call", daemon=True).start()

    def _call(self, answer: Future[Any], name: str, *given: object) -> None:
        try:
            answer.set_result(getattr(self._meeting, name)(*given))
        except BaseException as error:
            answer.set_exception(error)
