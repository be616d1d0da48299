"""The place where an island meets the others, as configured: a coordinator reached by TCP, a store, or both.

A run of several processes has one meeting: that of its first process, which tells the others what it learns there. The
contents of an entry are fetched as soon as the entry is there, while the devices make steps.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.config.sections.diloco_keys import DilocoConfig
from jaxtrain.diloco import gossip
from jaxtrain.diloco.host_arrays import of_first
from jaxtrain.diloco.log_records import as_json, entry_of
from jaxtrain.diloco.meeting import BackgroundMeeting, Entry, Meeting, Offer, Trimmed, Unanswered
from jaxtrain.diloco.waiting_meeting import WaitingMeeting
from jaxtrain.distributed.coordination import exchange
from jaxtrain.errors import UserError

TCP = "tcp://"
AHEAD_S = 600.0  # after which a thread that waits for an entry ahead of time gives up


def open_meeting(config: DilocoConfig) -> BackgroundMeeting:
    """Return the meeting of an island; every process of it makes this call."""
    if not config.meeting:
        raise UserError("diloco.meeting", "it is missing", "give tcp://HOST:PORT, or the --store, of "
                        "`jaxtrain diloco serve`, or both with a comma between them")
    found = places(config.meeting)
    first = _of(config, found) if jax.process_index() == 0 else None
    if jax.process_count() > 1:
        return SharedMeeting(first)
    assert first is not None
    return first


def places(meeting: str) -> list[str]:
    """Return the places that `diloco.meeting` names: one, or a port and the store to fall back to."""
    found, reason = [place.strip() for place in meeting.split(",")], ""
    if "" in found:
        reason = f"{meeting!r} has an empty part"
    elif len(found) > 1 and not found[0].startswith(TCP):
        reason = f"a comma divides two places, and the first one, {found[0]}, is not tcp://HOST:PORT"
    elif len(found) > 1 and found[1].startswith(TCP):
        reason = "it names two ports, and a coordinator has one"
    elif len(found) > 2:
        reason = f"it names {len(found)} places"
    if reason:
        raise UserError("diloco.meeting", reason,
                        "give tcp://HOST:PORT,STORE, with the coordinator's --store, or one of the two alone")
    for place in found:
        host, _, port = place.rpartition(":")
        if place.startswith("http") or Path(place).is_file() or (port.isdecimal() and "/" not in host):
            raise UserError("diloco.meeting", f"{place} is not a coordinator, a folder or object storage",
                            "give tcp://HOST:PORT, a folder, or a URL such as s3://BUCKET/islands")
    return found


def _of(config: DilocoConfig, found: list[str]) -> BackgroundMeeting:
    first = found[0]
    if len(found) > 1:
        from jaxtrain.diloco.network.fallback_meeting import FallbackMeeting

        reached: Meeting = FallbackMeeting(first.removeprefix(TCP), config.keys, found[1], config.index,
                                             config.count)
    elif first.startswith(TCP):
        from jaxtrain.diloco.network.tcp_meeting import TcpMeeting

        reached = TcpMeeting(first.removeprefix(TCP), config.keys, config.index, config.count)
    else:
        from jaxtrain.diloco.folder_meeting import FolderMeeting

        reached = FolderMeeting(first, config.index, config.count)
    if config.overlap:
        read = functools.partial(gossip.of, config.index) if config.mode == "gossip" else all_of
        reached = MeetingAhead(reached, read)
    return WaitingMeeting(reached)


def all_of(entry: Entry) -> Sequence[Offer]:
    """Return the contributions of an entry."""
    return entry.contributions


class MeetingAhead:
    """A meeting that looks for the entry of an offer, and fetches the others' contents, before anyone asks."""

    def __init__(self, meeting: Meeting, needed: Callable[[Entry], Sequence[Offer]] = all_of):
        """Look ahead in a meeting that any thread may use. `needed`: the offers of an entry whose contents it takes."""
        self._meeting, self._needed = meeting, needed
        self._contents: dict[str, bytes] = {}
        self._looking: threading.Thread | None = None

    def offer(self, offer: Offer, content: bytes) -> None:
        """Offer progress, and begin to look for its entry."""
        self._meeting.offer(offer, content)
        self._contents.clear()
        self._looking = threading.Thread(target=self._look, args=(offer,), name="islands-ahead", daemon=True)
        self._looking.start()

    def _look(self, own: Offer) -> None:
        try:
            for entry in self._meeting.entries(own.base, AHEAD_S):
                for offer in self._needed(entry):
                    if offer.sha256 != own.sha256:
                        self._contents[offer.sha256] = self._meeting.content(offer.sha256)
        except (OSError, LookupError, UserError, Unanswered):  # whoever asks in earnest gets the same, and reports it
            return

    def entries(self, after: int, wait: float) -> Sequence[Entry]:
        """Return the entries, as `Meeting` says."""
        return self._meeting.entries(after, wait)

    def content(self, sha256: str) -> bytes:
        """Return a content that may have come already, as `Meeting` says."""
        if self._looking:
            self._looking.join()
        return self._contents.get(sha256) or self._meeting.content(sha256)

    def put_snapshot(self, position: int, content: bytes) -> None:
        """Keep a snapshot, as `Meeting` says."""
        self._meeting.put_snapshot(position, content)

    def snapshot(self) -> tuple[int, bytes] | None:
        """Return the newest snapshot, as `Meeting` says."""
        return self._meeting.snapshot()


class SharedMeeting:
    """One meeting for all processes of a run, which make all calls but `begin` together, on their main threads."""

    def __init__(self, meeting: BackgroundMeeting | None):
        """`meeting`: that of the first process; None in the others."""
        self._meeting = meeting

    @property
    def _first(self) -> BackgroundMeeting:
        assert self._meeting is not None
        return self._meeting

    def begin(self, offer: Offer, content: bytes) -> None:
        """Begin to offer what the first process has."""
        if self._meeting is not None:
            self._meeting.begin(offer, content)

    def offer(self, offer: Offer, content: bytes) -> None:
        """Offer what the first process has."""
        _of_first(lambda: self._first.offer(offer, content))

    def entries(self, after: int, wait: float) -> Sequence[Entry]:
        """Return the entries, as `Meeting` says."""
        return [entry_of(one) for one in _of_first(lambda: [as_json(one) for one in self._first.entries(after, wait)])]

    def content(self, sha256: str) -> bytes:
        """Return a content, as `Meeting` says."""
        held: list[bytes] = []

        def read():
            held.append(self._first.content(sha256))
            return len(held[0])
        return _sent(_of_first(read), held)

    def put_snapshot(self, position: int, content: bytes) -> None:
        """Keep a snapshot, as `Meeting` says."""
        _of_first(lambda: self._first.put_snapshot(position, content))

    def snapshot(self) -> tuple[int, bytes] | None:
        """Return the newest snapshot, as `Meeting` says."""
        held: list[bytes] = []

        def read():
            if (found := self._first.snapshot()) is None:
                return None
            held.append(found[1])
            return [found[0], len(found[1])]
        found = _of_first(read)
        return found and (found[0], _sent(found[1], held))


def _of_first(do: Callable[[], Any]) -> Any:
    """Return in all processes what the first one gets as JSON, or raise what it raises."""
    def tried(_):
        try:
            return ["", do()]
        except (Trimmed, Unanswered) as error:
            return [type(error).__name__, f"{error}"]
    raised, answer = exchange(None, tried)
    if raised:
        raise {"Trimmed": Trimmed, "Unanswered": Unanswered}[raised](answer)
    return answer


def _sent(size: int, held: list[bytes]) -> bytes:
    """Return the bytes that the first process holds."""
    return of_first(np.frombuffer(held[0], np.uint8) if held else np.zeros(size, np.uint8)).tobytes()
