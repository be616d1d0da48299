"""The coordinator's decisions: which offers form the next entry of the log, and when.

Nothing here reads a clock, a file or a network. Offers, signs of life and the time come in; what comes out is records,
which are to be written down before anything is told, and are then applied. What is kept in memory alone (who is there,
how long the open round has waited) begins anew after a restart; the log and the open offers are read from the records.
Records up to an entry may be replaced by a summary of what they did.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from jaxtrain.base.annotations import JsonObject
from jaxtrain.diloco.log_records import as_json, entry_of, offer_of
from jaxtrain.diloco.meeting import Entry, Offer
from jaxtrain.errors import UserError

MODES = "sync", "async"
COUNTS = "entries", "steps", "tokens", "refused"  # of an island


@dataclass(frozen=True)
class Policy:
    """The rules by which offers become an entry."""

    mode: str = "sync"
    islands: int = 1  # sync: the first round waits for as many
    quorum: int = 1  # sync: fewest offers of which an entry is made; fewer when others are at their end
    timeout: float = 600.0  # sync: seconds after a round's first offer after which no island is waited for
    lease: float = 60.0  # sync: seconds without a sign of life after which an island is given up as lost
    oldest: int = 8  # async: most entries between an offer's base and its own entry

    def __post_init__(self):
        """Refuse what cannot work."""
        if self.mode not in MODES:
            raise UserError("--mode", f"there is no {self.mode!r}", f"known: {', '.join(MODES)}")
        if not 1 <= self.quorum <= self.islands:
            raise UserError("--quorum", f"{self.quorum} is not between 1 and --islands={self.islands}", "change one")
        for name in ("timeout", "lease", "oldest"):
            if getattr(self, name) < 0:
                raise UserError(f"--{name}", "it is negative", "give a number from 0 on")


class Coordinator:
    """The log and the open round; methods return the records of what they decided, already applied to neither.

    Whoever calls writes each record down and hands it to `apply`, before the next call.
    """

    def __init__(self, policy: Policy, records: Iterable[JsonObject] = ()):
        self.policy = policy
        self.entries: list[Entry] = []  # without those that only a summary has
        self.begins = 0  # the number of the newest entry before these
        self.counts: Counter[tuple[int, str]] = Counter()  # by island and name: what its offers in the log add up to
        self.open: dict[int, Offer] = {}  # by island: the offers of the round that is open
        self.bases: dict[int, int] = {}  # by island: the newest base that is settled or open
        self.newest: dict[int, int] = {}  # by island: the newest entry with an offer of it
        self.there: dict[int, float | None] = {}  # by island: when it was last heard of; None: before a restart
        self.left: set[int] = set()  # the islands whose last offer said that it is
        self._late: set[int] = set()  # islands whose newest offer came too late for its round
        self._opened: float | None = None  # when the open round had its first offer of another island
        for record in records:
            self.apply(record)
        latest = self.entries[-1].contributions if self.entries else ()
        self.there = {offer.island: None for offer in (*latest, *self.open.values()) if not offer.last}

    @property
    def position(self) -> int:
        """The number of the newest entry."""
        return self.begins + len(self.entries)

    def after(self, number: int) -> Sequence[Entry]:
        """Return the entries after this one, as far as they are kept."""
        return self.entries[max(0, number - self.begins):]

    def offer(self, offer: Offer, now: float) -> list[JsonObject]:
        """Take an offer; the same island and base again, or in a round that is closed, does nothing."""
        if offer.base > self.position:
            raise UserError(f"island {offer.island}", f"its offer follows entry {offer.base}, and this log has "
                            f"{self.position}",
                            "let all islands meet at the log that they started with, or start again")
        known = offer.base <= self.bases.get(offer.island, -1)
        if not known and (other := next(filter(offer.differs, self._since(offer.base)), None)):
            raise UserError(f"island {offer.island}", f"its outer parameters after entry {offer.base}, or its config, "
                            f"are not those of island {other.island}", "give all islands equal configs, except for "
                            "diloco.index, and equal first parameters")
        if not known or offer.island not in self.left:  # the last offer of one that left may come by another way again
            self.there[offer.island] = now
        if known:
            return []
        if self.policy.mode == "async":
            number = self.position + 1  # what follows its island's own newest entry late is the same progress again
            old = self.position - offer.base > self.policy.oldest or offer.base < self.newest.get(offer.island, 0)
            entry = Entry(number, offer.fragment, (), (offer,)) if old else Entry(number, offer.fragment, (offer,))
            return [{"entry": as_json(entry)}]
        if offer.round <= self.position:
            self._late.add(offer.island)
            return []
        if other := next((one for one in self.open.values() if one.fragment != offer.fragment), None):
            raise UserError(f"island {offer.island}", f"it offers fragment {offer.fragment} where island "
                            f"{other.island} offers {other.fragment}", "give all islands one config")
        return [{"offer": asdict(offer)}]

    def taken(self, offer: Offer) -> Offer | None:
        """Return the offer of this island with this base that is open or in the log, whatever its content."""
        same = (one for one in self._since(offer.base) if (one.island, one.base) == (offer.island, offer.base))
        return next(same, None)

    def _since(self, base: int) -> Iterable[Offer]:
        """Return the offers that are open, or in an entry behind this one."""
        return (*self.open.values(), *(one for entry in self.after(base) for one in (
            *entry.contributions, *entry.refused)))

    def alive(self, island: int, now: float) -> None:
        """Note a sign of life of an island; only its offers make it one that is waited for."""
        if island in self.there:
            self.there[island] = now

    def tick(self, now: float) -> list[JsonObject]:
        """Close the round if it is complete, or if it waited long enough."""
        if not self.open:
            return []
        if self._opened is None and self.open.keys() - self._late:  # those offer again at once, ahead of the others
            self._opened = now
        seen = {island: now if at is None else at for island, at in self.there.items()}
        self.there = {island: at for island, at in seen.items() if island in self.open or now - at <= self.policy.lease}
        missing = self.there.keys() - self.open.keys()
        quorum = max(1, min(self.policy.quorum, self.policy.islands - len(self.left)))
        is_complete = not missing and len(self.open) >= (quorum if self.position else self.policy.islands)
        is_over = (self._opened is not None and now - self._opened >= self.policy.timeout and len(self.open) >= quorum)
        if not is_complete and not is_over:
            return []
        for island in missing:  # until its next offer, so that a dead one costs one timeout, not one a round
            del self.there[island]
        offers = tuple(self.open[island] for island in sorted(self.open))
        return [{"entry": as_json(Entry(self.position + 1, offers[0].fragment, offers))}]

    def apply(self, record: JsonObject) -> None:
        """Make a record, which is written down, part of the state."""
        if "summary" in record:
            self._begin(record["summary"])
            return
        if "offer" in record:
            offer = offer_of(record["offer"])
            self.open[offer.island] = offer
            self.bases[offer.island] = offer.base
            return
        entry = entry_of(record["entry"])
        if entry.number != self.position + 1:
            raise ValueError(f"entry {entry.number} follows entry {self.position}")
        self.entries.append(entry)
        for offer in entry.contributions + entry.refused:
            self.bases[offer.island] = offer.base
            self.newest[offer.island] = entry.number
            self.open.pop(offer.island, None)
            self._late.discard(offer.island)
            (self.left.add if offer.last else self.left.discard)(offer.island)
            if offer.last:
                self.there.pop(offer.island, None)
        for offer in entry.contributions:
            for name, by in (("entries", 1), ("steps", offer.steps), ("tokens", offer.tokens)):
                self.counts[offer.island, name] += by
        self.counts.update((offer.island, "refused") for offer in entry.refused)
        self._opened = None

    def forget(self, number: int) -> None:
        """Keep no entries up to this one."""
        self.entries, self.begins = list(self.after(number)), max(number, self.begins)

    def summary(self) -> list[JsonObject]:
        """Return records that do what all records up to now did, except for the entries themselves."""
        islands = [{"island": island, "base": self.bases[island], "newest": self.newest[island],
                    "left": island in self.left, **{name: self.counts[island, name] for name in COUNTS}}
                   for island in sorted(self.newest)]
        return [{"summary": {"position": self.position, "islands": islands}},
                *({"offer": asdict(offer)} for offer in self.open.values())]

    def _begin(self, summary: JsonObject) -> None:
        self.begins = summary["position"]
        for one in summary["islands"]:
            island = one["island"]
            self.bases[island], self.newest[island] = one["base"], one["newest"]
            self.left |= {island} if one["left"] else set()
            self.counts.update({(island, name): one[name] for name in COUNTS})


def compacted(records: Sequence[JsonObject], number: int) -> list[JsonObject]:
    """Return records that do what these do, with a summary in the place of those up to entry `number`."""
    end = next(i for i, record in enumerate(records, 1) if record.get("entry", {}).get("number") == number)
    return [*Coordinator(Policy(), records[:end]).summary(), *records[end:]]
