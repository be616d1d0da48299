"""The state that islands share: an ordered log of outer updates, and the islands' offers from which entries are made.

An island is an ordinary run with its own mesh and workdir. After some inner steps it offers how far it came, for one
fragment of its parameters. A coordinator makes entries of offers, numbered from 1 on without a gap; nothing in the log
ever changes. Every island applies the entries in their order by the same arithmetic, so parameters and momentum of the
outer optimizer are the same bits on all of them.

How entries come about depends on the mode:

- sync: entry n has the offers whose round is n, of all islands that are there, or of those that came by the deadline.
  An offer whose entry exists is late, and never becomes part of another one: the island reads the entry, keeps its
  progress, and offers it with the next round.
- async: every offer makes an entry of its own as it arrives. One that is too old, counted in entries since its base,
  makes an entry with no contribution in which it stands as refused.

An island is there from its first offer to the one that says `last`, or until it is given up as lost; it may come back.
At most one offer of an island is open at a time, and its base grows from offer to offer. So an island and a base name
an offer: the same pair again, after a restart, is the same offer and does nothing, whatever its content.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, order=True)
class Offer:
    """An island's progress since its last exchange; its content, bytes for islands alone, is sent beside it."""

    island: int
    base: int  # the number of the last entry that the island had applied when it computed this
    fragment: int
    weight: float  # among the contributions of one entry; the mode's own weight for age is applied on top
    sha256: str  # of the content, in hexadecimal digits
    steps: int = 0  # inner steps that it covers
    tokens: int = 0  # that they were trained on
    last: bool = False  # whether the island leaves after it
    same: str = ""  # a hash of what all islands have alike after entry `base`: outer parameters and config; "": unknown

    @property
    def round(self) -> int:
        """The number of the entry that it is meant for."""
        return self.base + 1

    def differs(self, other: "Offer") -> bool:
        """Return whether two offers that follow one entry are of islands that cannot train together."""
        return self.base == other.base and "" != self.same != other.same != ""


@dataclass(frozen=True)
class Entry:
    """One outer update."""

    number: int  # from 1 on
    fragment: int
    contributions: tuple[Offer, ...]  # in order of their islands; with none, nothing is updated
    refused: tuple[Offer, ...] = ()  # too old: the log says so, so that their islands need not wait

    def has(self, island: int, base: int) -> bool:
        """Return whether the offer of this island with this base is settled here, one way or the other."""
        return any((offer.island, offer.base) == (island, base) for offer in self.contributions + self.refused)


class Trimmed(LookupError):
    """Raised where entries or contents are asked for that the log no longer has; adopt the snapshot."""


class Unanswered(Exception):
    """Raised where a call is still under way: the same call, made again, goes on waiting for its answer."""


class Meeting(Protocol):
    """An island's connection to the others. Calls may wait and retry; what they raise in the end is an OSError."""

    def offer(self, offer: Offer, content: bytes) -> None:
        """Offer progress; returns once the offer cannot get lost, which is not yet its entry."""

    def entries(self, after: int, wait: float) -> Sequence[Entry]:
        """Return the entries with numbers from `after + 1` on; waits for one for this many seconds, then returns none.

        Raises:
            Trimmed: entry `after + 1` was there once.
        """
        ...

    def content(self, sha256: str) -> bytes:
        """Return the content of an offer in the log, which has this hash.

        Raises:
            Trimmed: it was there once.
        """
        ...

    def put_snapshot(self, position: int, content: bytes) -> None:
        """Keep the outer state after entry `position`, for islands that come later; an older one does nothing.

        The entries up to the snapshot before this one, and their contents, may go.
        """

    def snapshot(self) -> tuple[int, bytes] | None:
        """Return the newest snapshot with its position; None: there is none yet, and the log is whole."""
        ...


class BackgroundMeeting(Meeting, Protocol):
    """A meeting to which an offer can be sent while training goes on."""

    def begin(self, offer: Offer, content: bytes) -> None:
        """Begin to make an offer, in any thread and any process of a run; the same call of `offer` waits for it."""
