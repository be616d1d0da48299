"""A meeting of islands in one process, whose coordinator decides at once, or when a test says so."""

import hashlib
import threading
import time

from jaxtrain.diloco.meeting import Entry, Trimmed, Unanswered


class MemoryMeeting:
    """The log of some islands, which may be threads."""

    def __init__(self, count, mode="sync", max_age=None):
        self.log, self.contents, self.kept, self.sent = [], {}, None, 0
        self._members, self._open, self._mode, self._max_age = set(range(count)), {}, mode, max_age
        self._first = 1  # the first entry that is still there
        self._changed = threading.Condition()

    def begin(self, offer, content):
        """Nothing: `offer` does it all."""

    def offer(self, offer, content):
        assert hashlib.sha256(content).hexdigest() == offer.sha256
        with self._changed:
            settled = any(entry.has(offer.island, offer.base) for entry in self.log)
            if settled or (offer.island, offer.base) in self._open or (self._mode != "async" and self.late(offer)):
                return
            self.sent += len(content)
            self.contents[offer.sha256] = content
            self._members.add(offer.island)
            if self._mode == "async":
                old = self._max_age is not None and len(self.log) - offer.base > self._max_age
                self._append(Entry(len(self.log) + 1, offer.fragment, () if old else (offer,), (offer,) if old else ()))
                return
            self._open[offer.island, offer.base] = offer
            if self._members == {island for island, _ in self._open}:
                self.decide()

    def late(self, offer):
        return offer.round <= len(self.log)

    def decide(self):
        """Make an entry of the offers that are there, as at a deadline."""
        with self._changed:
            there = sorted(self._open.values())
            self._members -= {offer.island for offer in there if offer.last}
            self._open.clear()
            self._append(Entry(len(self.log) + 1, there[0].fragment, tuple(there)))

    def lose(self, island):
        """Go on without an island."""
        with self._changed:
            self._members.discard(island)

    def trim(self, before):
        """Forget the entries before this one."""
        self._first = before

    def entries(self, after, wait):
        if after + 1 < self._first:
            raise Trimmed
        with self._changed:
            if wait and len(self.log) <= after:
                self._changed.wait(wait)
            return self.log[after:]

    def content(self, sha256):
        return self.contents[sha256]

    def put_snapshot(self, position, content):
        if self.kept is None or position > self.kept[0]:
            self.kept = position, content

    def snapshot(self):
        return self.kept

    def _append(self, entry):
        self.log.append(entry)
        self._changed.notify_all()


class OutOfReach:
    """A meeting that answers no more from the first `call` at, or after, so many of `what`; `told` is called then."""

    def __init__(self, meeting, call, number, told=lambda: None, what="offer"):
        self._meeting, self._call, self._left, self._told, self._what = meeting, call, number, told, what
        self.down = False

    def __getattr__(self, name):
        def asked(*given):
            self._left -= name == self._what
            self.down |= name == self._call and self._left <= 0
            if self.down:
                self._told()
                raise Unanswered
            return getattr(self._meeting, name)(*given)
        return asked


def wait_until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
