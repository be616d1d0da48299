"""An island's copy of the outer state: what the log's entries make of it, one after the other, or a snapshot.

An entry moves the island's own parameters, too: to the outer ones, if it has the island's open offer, and else by as
much as these, so that no progress is lost. Of gossip, only an entry with the open offer changes anything.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.base.annotations import PyTree
from jaxtrain.config.sections.diloco_keys import DilocoConfig
from jaxtrain.diloco import gossip
from jaxtrain.diloco.fragments import fragments, shapes
from jaxtrain.diloco.host_arrays import HostArrays
from jaxtrain.diloco.meeting import Entry, Offer, Trimmed
from jaxtrain.diloco.outer_optimizer import OuterOptimizer
from jaxtrain.diloco.payload import make_payload
from jaxtrain.errors import UserError, say
from jaxtrain.sharding.axis_rules import Axes


class OuterReplica:
    """The outer state after the entry `position`; its arrays are in the `work` of each call."""

    def __init__(self, config: DilocoConfig, params: PyTree, axes: Axes, asked: Callable[..., Any],
                 count: Callable[[str, float], None]):
        """Begin before the first entry.

        Args:
            params: the shapes of the trained parameters.
            axes: their logical names.
            asked: returns what the meeting answers to a call, given its name and arguments.
            count: adds to a field of the next line of metrics.
        """
        self.diloco, self.position = config, 0
        self.exact = config.mode == "sync" and config.compression == "none"  # offers are parameters
        self.fragments = fragments(params, axes, config.fragments)
        self.payloads = [make_payload(config, shapes(fragment, params, axes)) for fragment in self.fragments]
        self._asked, self._count = asked, count
        self._gossips = config.mode == "gossip"
        self._optimizer = OuterOptimizer(config.learning_rate, config.momentum, config.count, config.age_decay,
                                         config.pull)
        self._made: tuple[Offer, bytes] | None = None

    def remember(self, offer: Offer, content: bytes) -> None:
        """Remember the last offer that this process made: its content need not be fetched."""
        self._made = offer, content

    # ---------------------------------------------------------------------------------------------------------- entries
    def apply(self, entry: Entry, work: HostArrays, base: int = -1, blend: float = 0.0) -> bool:
        """Apply the entry that follows; return whether the island's open offer is settled in it.

        Args:
            base: that of the open offer; negative: none is open.
            blend: the share of the island's own parameters that is kept where that offer is settled.
        """
        if entry.number != self.position + 1:
            raise OSError(f"the islands' log has entry {entry.number} where {self.position + 1} is next")
        for other in entry.contributions:
            if self._made and self._made[0].differs(other):
                raise UserError("diloco.index", f"island {other.island} has other outer parameters after entry "
                                f"{other.base} than this one, or another config", "give all islands equal configs, but "
                                "for diloco.index, and equal first parameters")
        fragment, mine = self.fragments[entry.fragment], entry.has(self.diloco.index, base)
        old = {name: work.get(name, fragment) for name in ("params", *self.diloco.shared)}
        new = self.updated(entry, old, mine)
        for name, vector in new.items():
            work.set(name, fragment, vector)
        self.position = entry.number
        if mine:
            self._warn_of_twin(entry)
            came = new.get("params", old["params"])
            work.set("own", fragment, came if not blend else
                     np.float32(blend) * work.get("own", fragment) + np.float32(1 - blend) * came)
        elif "params" in new:
            work.set("own", fragment, work.get("own", fragment) + (new["params"] - old["params"]))
        return mine

    def updated(self, entry: Entry, old: Mapping[str, np.ndarray], mine: bool = False) -> dict[str, np.ndarray]:
        """Return the vectors of the entry's fragment that it changes. `mine`: it has the island's open offer."""
        size, came, slow, mode = old["params"].size, [], [], self.diloco.mode
        if (len(entry.contributions) > 1 if mode == "async" else
                any(offer.base != entry.number - 1 for offer in entry.contributions)):
            raise UserError("diloco.mode", f"it is {mode}, and the coordinator made entry {entry.number} in the other "
                            "one", f"start jaxtrain diloco serve with --mode={'async' if mode == 'async' else 'sync'},"
                            " a new log and new workdirs")
        offers: Sequence[Offer] = entry.contributions
        if self._gossips:
            offers = gossip.of(self.diloco.index, entry) if mine else ()
        for offer in offers:
            content = self._content(offer)
            if self._gossips:
                content, outer = gossip.unpacked(content, size)
                slow.append(outer)
            came.append(self.payloads[entry.fragment].decode(content))
        if not came:
            return {}
        if mode == "async":
            return self._optimizer.arrived(dict(old), came[0], entry.number,
                                           entry.number - 1 - entry.contributions[0].base)
        weights = [offer.weight for offer in offers]
        if self._gossips:
            return self._optimizer.paired(dict(old), came, slow, weights)
        return self._optimizer.together(dict(old), came, weights, self.exact)

    def _content(self, offer: Offer) -> bytes:
        if self._made and offer.sha256 == self._made[0].sha256:
            return self._made[1]
        content = self._asked("content", offer.sha256)
        self._count("island_received_bytes", len(content))
        return content

    def _warn_of_twin(self, entry: Entry) -> None:
        """Say so if an entry has another offer of this island than the one that was made here."""
        others = [offer for offer in entry.contributions if offer.island == self.diloco.index]
        if self._made and any(offer.sha256 != self._made[0].sha256 for offer in others) and not jax.process_index():
            say(f"diloco.index: entry {entry.number} has an offer of island {self.diloco.index} that this run did "
                "not make, and what it did since the last one is lost; give each island an index of its own (after a "
                "restart on devices that do not repeat their bits this is as it has to be)")

    # --------------------------------------------------------------------------------------- what an island begins with
    def catch_up(self, work: HostArrays) -> bool:
        """Take a new island, without progress of its own, to the end of the log; return whether that has entries.

        If its first offer is in the log, as after a kill before its first checkpoint, it begins where it did then: it
        makes the same steps and offers again, which do nothing.
        """
        end, entry = self._first_base(), None
        self.adopt_snapshot(work, end)
        while entries := [one for one in self._asked("entries", self.position, 0) if one.number <= end]:
            for entry in entries:
                self.apply(entry, work)
        if self.position:
            self.adopt(work, entry)
        return self.position > 0

    def _first_base(self) -> float:
        """Return the entry that the island's first offer in the log follows; infinity without one, or if it is gone."""
        after = 0
        with contextlib.suppress(Trimmed):
            while entries := self._asked("entries", after, 0):
                for offer in (one for entry in entries for one in entry.contributions + entry.refused):
                    if offer.island == self.diloco.index:
                        return offer.base
                after = entries[-1].number
        return math.inf

    def adopt(self, work: HostArrays, entry: Entry | None = None) -> None:
        """Give up the island's own progress; of gossip, its outer parameters too, for those of an island of this entry.
        """
        if entry and self._gossips:
            (fragment,), content = self.fragments, self._asked("content", entry.contributions[0].sha256)
            work.set("params", fragment, gossip.unpacked(content, work.get("params", fragment).size)[1])
        for fragment in self.fragments:
            work.set("own", fragment, work.get("params", fragment))

    # -------------------------------------------------------------------------------------------------------- snapshots
    def keep_snapshot(self, entry: Entry, work: HostArrays) -> None:
        """Leave a snapshot for others every some entries: the entry's first island does, whose state is as good as any.
        """
        if (entry.number % self.diloco.snapshot_every == 0 and entry.contributions
                and entry.contributions[0].island == self.diloco.index):
            self._asked("put_snapshot", self.position, b"".join(
                work.get(name, fragment).tobytes() for name in ("params", *self.diloco.shared)
                for fragment in self.fragments))

    def adopt_snapshot(self, work: HostArrays, end: float = math.inf) -> bool:
        """Take the newest snapshot of the outer state, if it is ahead of this island's, and not behind entry `end`.

        Return whether it was.
        """
        position, content = self._asked("snapshot") or (0, b"")
        if not self.position < position <= end:
            return False
        kept = [(name, fragment) for name in ("params", *self.diloco.shared) for fragment in self.fragments]
        ends = np.cumsum([work.get(*one).size for one in kept])
        if len(content) != 4 * ends[-1]:
            raise UserError("diloco.meeting", "its snapshot is of another model or outer optimizer",
                            "give all islands equal configs, except for diloco.index")
        for one, vector in zip(kept, np.split(np.frombuffer(content, "<f4"), ends[:-1]), strict=True):
            work.set(*one, vector)
        self.position = position
        self.adopt(work)
        return True
