"""An island's two ways to one log: the coordinator's port and, while that is out of reach, the coordinator's store.

What the coordinator decided is at its store some moments later than at its port. So what an island does at the store
with what it read at the port waits until that is there. An offer counts as made at the store once the coordinator has
taken it, since the island may go on at the port, or be restarted, before that. Made at both, it is one offer, as one
that is made again after a restart is.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from jaxtrain.diloco.folder_meeting import FolderMeeting
from jaxtrain.diloco.meeting import Entry, Offer, Trimmed, Unanswered
from jaxtrain.diloco.network.tcp_meeting import TcpMeeting
from jaxtrain.errors import UserError, say

FALL_BACK_S = 45.0  # without an answer, after which a way is out of reach
SILENCE_S = 30.0  # without a byte, after which another connection is tried
AGAIN_S = 30.0  # between two attempts to reach the port again
TELL_S = 60.0  # between two times that it says that both are out of reach
PATIENCE_S = 3600.0  # without an answer of either, after which a call raises an OSError
LOOK_S = 0.5, 2.0  # between two looks at the store for what the coordinator is to do there; of a wait for entries
T = TypeVar("T")


class _Returned(Exception):
    """Raised at the store when the port is in use again."""


class FallbackMeeting:
    """The coordinator at an address and its store, for one island; any thread may use it."""

    def __init__(self, address: str, keys: str | Path, place: str, island: int, islands: int = 1):
        """Use the port, HOST:PORT, with its certificates in the folder `keys`, and fall back to the store `place`."""
        self._address, self._place, self._island = address, place, island
        port = address.rpartition(":")[2]
        self._serve = (f"jaxtrain diloco serve --workdir=DIR --address=0.0.0.0:{port} --keys=DIR --store={place} "
                       f"--islands={islands}")
        self._at_port, self._lock, self._closed = threading.Event(), threading.Lock(), threading.Event()
        self._at_port.set()
        self._why = ""  # the port is out of reach
        self._has_told = False  # that nobody serves the store, while it was not in use
        self._told = self._heard = time.monotonic()
        self._numbers: dict[str, int] = {}  # of entries, by the hashes of their contents
        self._lacks = -1  # the newest entry after which the log begins by now
        self._port = TcpMeeting(address, keys, island, islands, patience=FALL_BACK_S, silence=SILENCE_S, quiet=True)
        self._store = FolderMeeting(place, island, islands, patience=FALL_BACK_S, unserved=self._unserved)

    def close(self) -> None:
        """Close both."""
        self._closed.set()
        self._port.close()
        self._store.close()

    def offer(self, offer: Offer, content: bytes) -> None:
        """Offer progress, as `Meeting` says."""
        def at_store() -> None:
            self._store.offer(offer, content)
            while not self._store.has_taken(offer):
                self._check_away(LOOK_S[0])

        self._tried(lambda: self._port.offer(offer, content), at_store)

    def entries(self, after: int, wait: float) -> Sequence[Entry]:
        """Return the entries after this one, as `Meeting` says."""
        end = time.monotonic() + wait

        def left() -> float:
            return max(0.0, end - time.monotonic())

        def at_store() -> Sequence[Entry]:
            while True:
                try:
                    found = self._store.entries(after, min(left(), LOOK_S[1]))
                except Unanswered:
                    if not left():
                        raise
                else:
                    if found or not left():
                        return found
                self._check_away()

        with self._noting(after):
            found = self._tried(lambda: self._port.entries(after, left()), at_store)
        self._numbers |= {offer.sha256: entry.number for entry in found for offer in entry.contributions}
        return found

    def content(self, sha256: str) -> bytes:
        """Return the content of an offer in the log, as `Meeting` says."""
        number = self._numbers[sha256]

        def at_store() -> bytes:
            self._wait_for(number)
            return self._store.content(sha256)

        with self._noting(number - 1):
            return self._tried(lambda: self._port.content(sha256), at_store)

    def put_snapshot(self, position: int, content: bytes) -> None:
        """Keep the outer state after an entry, as `Meeting` says."""
        def at_store() -> None:
            with contextlib.suppress(Trimmed):  # there are newer ones
                self._wait_for(position)  # who finds a snapshot there expects its entry to be there
                self._store.put_snapshot(position, content)

        self._tried(lambda: self._port.put_snapshot(position, content), at_store)

    def snapshot(self) -> tuple[int, bytes] | None:
        """Return the newest snapshot, as `Meeting` says."""
        def at_store() -> tuple[int, bytes] | None:
            while (found := self._store.snapshot() or (0, b""))[0] <= self._lacks:
                self._check_away(LOOK_S[0])
            return found if found[0] else None

        return self._tried(self._port.snapshot, at_store)

    # ----------------------------------------------------------------------------------------------------- at the store
    def _wait_for(self, number: int) -> None:
        """Return once the store has this entry; raises Trimmed if it was there once."""
        while True:
            with contextlib.suppress(Unanswered):
                if self._store.entries(number - 1, LOOK_S[1]):
                    return
            self._check_away()

    def _check_away(self, seconds: float = 0.0) -> None:
        if self._at_port.wait(seconds):
            raise _Returned
        if self._closed.is_set():
            raise OSError(f"{self._place} is closed")

    @contextlib.contextmanager
    def _noting(self, after: int) -> Iterator[None]:
        try:
            yield
        except Trimmed:
            self._lacks = max(self._lacks, after)
            raise

    # ------------------------------------------------------------------------------------------- from one to the other
    def _tried(self, at_port: Callable[[], T], at_store: Callable[[], T]) -> T:
        """Return what the port answers, or, while that is out of reach, what the store does."""
        begun = time.monotonic()
        while True:
            is_away = not self._at_port.is_set()
            try:
                if is_away:
                    self._store.find_log()
                self._check_log()
                done = at_store() if is_away else at_port()
                self._heard = time.monotonic()
                return done
            except _Returned:
                continue
            except OSError as error:
                if self._closed.is_set():
                    raise
                if not is_away:
                    self._fall_back(error)
                elif time.monotonic() - max(begun, self._heard) > PATIENCE_S:
                    raise
                else:
                    self._tell_neither(error)

    def _check_log(self) -> None:
        """Refuse a store of another log, as of an earlier coordinator, as soon as both are known."""
        if self._port.log and self._store.log and self._port.log != self._store.log:
            raise UserError("diloco.meeting", f"{self._place} has another log than the coordinator at {self._address}",
                            "give the --store of that coordinator")

    def _fall_back(self, error: OSError) -> None:
        with self._lock:
            if not self._at_port.is_set():  # another thread did
                return
            self._why = f"{error}"
            self._at_port.clear()
            say(f"{error}; island {self._island} continues at {self._place}, and tries the port again every "
                f"{AGAIN_S:.0f} s")
        if self._store.is_unserved:
            say(self._unserved())
        threading.Thread(target=self._return, name="islands-return", daemon=True).start()

    def _return(self) -> None:
        """Go back to the port as soon as it answers, also if it refuses this island, as the next call then reports."""
        while not self._closed.wait(AGAIN_S):
            try:
                self._port.reach()
            except (OSError, EOFError):
                continue
            except UserError:
                pass
            else:
                say(f"{self._address}: the coordinator of the islands answers again, and island {self._island} returns "
                    f"to it from {self._place}")
            self._at_port.set()
            return

    def _tell_neither(self, error: OSError) -> None:
        if (now := time.monotonic()) - self._told >= TELL_S:
            self._told = now
            say(f"{self._why}, and so is {self._place} ({error}); island {self._island} tries both")

    def _unserved(self) -> str:
        """Return what to say while no coordinator serves the store; "": it was said before, and matters little now."""
        if not self._at_port.is_set():
            return (f"{self._place}: no coordinator serves it either, so island {self._island} waits for the others at "
                    f"its next exchange, and tries both; start one with {self._serve}")
        if self._has_told:
            return ""
        self._has_told = True
        return (f"{self._place}: no coordinator serves it, so island {self._island} cannot go on there if "
                f"{self._address} is out of reach; start the coordinator with {self._serve}")
