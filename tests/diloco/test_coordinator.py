"""The coordinator's decisions over random schedules: islands that are slow, die, come back and repeat themselves."""

import json
import random

import pytest

from jaxtrain.diloco.coordinator import Coordinator, Policy, compacted
from jaxtrain.diloco.meeting import Offer
from jaxtrain.errors import UserError


def offered(island, base, fragment=0, last=False, content=0, same=""):
    return Offer(island, base, fragment, 1.0, f"{content:064x}", last=last, same=same)


class World:
    """A coordinator that writes its records down, and may be restarted from them."""

    def __init__(self, policy):
        self.policy, self.records, self.now = policy, [], 0.0
        self.mind = Coordinator(policy)

    def write(self, records, only=None):
        for record in records[:only]:
            self.records.append(json.loads(json.dumps(record)))
            self.mind.apply(record)

    def offer(self, *given, **keys):
        self.write(self.mind.offer(offered(*given, **keys), self.now))
        self.pass_time(0)

    def pass_time(self, seconds, alive=()):
        self.now += seconds
        for island in alive:
            self.mind.alive(island, self.now)
        self.write(self.mind.tick(self.now))

    def restart(self):
        before = self.known()
        self.mind = Coordinator(self.policy, self.records)
        assert before == self.known()

    def known(self):
        mind = self.mind
        return mind.begins, mind.entries, mind.open, mind.bases, mind.newest, mind.left, mind.counts

    def compact(self, number):
        self.records = json.loads(json.dumps(compacted(self.records, number)))
        self.mind.forget(number)

    def islands(self):
        return [[offer.island for offer in entry.contributions] for entry in self.mind.entries]


def test_an_island_that_left_is_not_waited_for_because_its_last_offer_comes_again():
    world = World(Policy(islands=2))
    for base, last in ((0, False), (1, True)):
        world.offer(0, base)
        world.offer(1, base, last=last)
    world.offer(1, 1, last=True)
    world.offer(0, 2)
    assert world.islands() == [[0, 1], [0, 1], [0]]
    world.offer(1, 2)  # its run became longer
    world.offer(0, 3)
    assert len(world.islands()) == 3
    world.offer(1, 3)
    assert world.islands()[3:] == [[0, 1]]


def test_a_round_waits_for_all_islands_and_closes_with_the_last():
    world = World(Policy(islands=3, quorum=2))
    for island in (2, 0):
        world.offer(island, 0)
        world.pass_time(50, alive=(0, 2))
    assert world.islands() == []
    world.offer(1, 0)
    assert world.islands() == [[0, 1, 2]]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_island_that_differs_from_another_is_refused(mode):
    """Offers that follow one entry are compared, open or settled; one that is known already does nothing."""
    world, one, other = World(Policy(mode, islands=2)), "1" * 64, "2" * 64
    world.offer(0, 0, same=one)
    with pytest.raises(UserError, match=r"^island 1: its outer parameters after entry 0, or its config, are"):
        world.offer(1, 0, same=other)
    assert 1 not in world.mind.there
    world.offer(0, 0, same=other)
    world.offer(1, 0, same=one)
    world.restart()
    world.offer(0, 1, same=one)
    world.offer(1, 2 if mode == "async" else 1, same=one)
    assert len(world.mind.entries) == (4 if mode == "async" else 2)


def test_who_is_missing_at_the_deadline_is_not_waited_for_until_it_offers_again():
    world = World(Policy(islands=3, quorum=2, timeout=100))
    for island in range(3):
        world.offer(island, 0)
    world.offer(0, 1)
    world.pass_time(101, alive=range(3))
    assert world.mind.position == 1, "one offer is less than the quorum"
    world.offer(1, 1)
    assert world.islands()[1:] == [[0, 1]], "the deadline was over"
    world.offer(0, 2)
    world.offer(1, 2)
    assert world.islands()[2:] == [[0, 1]], "island 2 was not waited for again"
    world.offer(2, 1)  # late: it does nothing, but the island is there again
    world.offer(0, 3)
    world.offer(1, 3)
    assert world.mind.position == 3
    world.offer(2, 3)
    assert world.islands()[3:] == [[0, 1, 2]]


def test_an_offer_that_is_made_again_does_not_start_the_clock():
    """Otherwise an island that was late once would close each round alone, before the others are done with theirs."""
    world = World(Policy(islands=2, timeout=10))
    for base in (0, 1):
        world.offer(0, base)
        world.offer(1, base) if not base else world.pass_time(11, alive=(0, 1))
    assert world.islands() == [[0, 1], [0]]
    for base in (1, 2):
        world.offer(1, base)
    world.pass_time(30, alive=(0, 1))
    assert world.mind.position == 2
    world.offer(0, 2)
    assert world.islands()[2:] == [[0, 1]]
    for island in (1, 0):
        world.offer(island, 3)
        world.pass_time(11, alive=(0, 1))
    assert world.islands()[3:] == [[1]], "the next one does"


def test_who_gives_no_sign_of_life_is_not_waited_for():
    world = World(Policy(islands=2, timeout=1000, lease=60))
    for island in range(2):
        world.offer(island, 0)
    world.offer(0, 1)
    world.pass_time(59, alive=[0])
    assert world.mind.position == 1
    world.pass_time(2, alive=[0])
    assert world.islands()[1:] == [[0]]


def test_after_a_restart_each_has_a_lease_to_come_back():
    world = World(Policy(islands=2, timeout=1000, lease=60))
    for island in range(2):
        world.offer(island, 0)
    world.offer(0, 1)
    world.now += 10_000  # while it was down
    world.restart()
    world.pass_time(0)
    world.pass_time(59)
    assert world.mind.position == 1
    world.offer(1, 1)
    assert world.islands()[1:] == [[0, 1]]


def test_an_island_that_leaves_is_in_its_last_round_and_in_none_after_it():
    world = World(Policy(islands=2, timeout=1000))
    for island in range(2):
        world.offer(island, 0, last=island == 1)
    world.restart()
    world.offer(0, 1)
    assert world.islands() == [[0, 1], [0]]


def test_those_at_their_end_do_not_count_for_the_quorum():
    world = World(Policy(islands=3, quorum=2, timeout=100))
    for island in range(3):
        world.offer(island, 0, last=island > 0)
    world.restart()
    world.offer(0, 1)
    assert world.islands() == [[0, 1, 2], [0]]
    world.compact(1)
    world.restart()
    world.offer(0, 2, last=True)
    assert world.islands() == [[0], [0]]


def test_without_rounds_each_offer_is_an_entry_and_old_ones_are_refused():
    world = World(Policy("async", oldest=2))
    for island, base in ((0, 0), (1, 0), (1, 1), (0, 1), (2, 0), (1, 0)):
        world.offer(island, base, island)
    assert world.islands() == [[0], [1], [], [0], []], "the same offer again does nothing"
    refused = [offer for entry in world.mind.entries for offer in entry.refused]
    assert [(offer.island, offer.base) for offer in refused] == [(1, 1), (2, 0)], "entry 2 has what it did"


def test_offers_that_cannot_be_are_refused_in_one_sentence():
    world = World(Policy(islands=2))
    with pytest.raises(UserError, match="follows entry 3, and this log has 0"):
        world.offer(0, 3)
    world.offer(0, 0, 1)
    with pytest.raises(UserError, match="offers fragment 2 where island 0 offers 1"):
        world.offer(1, 0, 2)
    for keys in ({"mode": "other"}, {"quorum": 2}, {"quorum": 0}, {"timeout": -1.0}):
        with pytest.raises(UserError):
            Policy(**keys)


def storm(seed, steps=100):
    """Islands that keep the protocol, whatever happens; returns the world, and which offers were accepted."""
    rng = random.Random(seed)
    islands = rng.randint(1, 5)
    policy = Policy(rng.choice(["sync", "sync", "async"]), islands, rng.randint(1, islands), 20.0, 10.0, 4)
    world, told, accepted = World(policy), [], set()
    read = dict.fromkeys(range(islands), 0)  # how far each has applied the log
    sent = []

    for _ in range(steps):
        island, doing = rng.randrange(islands), rng.random()
        if doing < 0.5:
            mine = {(one.island, one.base) for entry in world.mind.entries
                    for one in entry.contributions + entry.refused} | {
                        (one.island, one.base) for one in world.mind.open.values()}
            base = read[island]
            if (island, base) not in mine and all(other != island or other_base < base for other, other_base in mine):
                sent.append(offered(island, base, base % 3, content=rng.getrandbits(60)))
        if doing < 0.6 and sent:  # also old ones, again
            offer = sent[-1] if doing < 0.5 else rng.choice(sent)
            records = world.mind.offer(offer, world.now)
            if rng.random() < 0.1:
                world.restart()  # before anything was written
                continue
            world.write(records)
            if records:
                accepted.add((offer.island, offer.base))
        if doing > 0.6:
            read[island] = rng.randint(read[island], world.mind.position)
        if doing > 0.9:
            read[island] = rng.randint(0, read[island])  # it goes on from an older checkpoint
        if rng.random() < 0.1:
            world.restart()
        world.pass_time(rng.choice([0, 1, 5]), [one for one in range(islands) if rng.random() < 0.7])
        begins = world.mind.begins
        assert world.mind.entries[: len(told) - begins] == told[begins:], "what was told never changes"
        told += world.mind.after(len(told))
        if rng.random() < 0.05 and world.mind.position > begins:
            world.compact(rng.randint(begins + 1, world.mind.position))
    return world, told, accepted


def check(seed):
    world, entries, accepted = storm(seed)
    assert [entry.number for entry in entries] == list(range(1, len(entries) + 1))
    settled = [(offer.island, offer.base) for entry in entries for offer in entry.contributions + entry.refused]
    waiting = {(offer.island, offer.base) for offer in world.mind.open.values()}
    assert len(settled) == len(set(settled)) and accepted == set(settled) | waiting, "once, and none is lost"
    for entry in entries:
        assert world.policy.mode == "async" or {offer.round for offer in entry.contributions} == {entry.number}
        assert world.policy.mode == "async" or len(entry.contributions) >= world.policy.quorum
        assert all(entry.number - 1 - offer.base <= 4 for offer in entry.contributions)
    world.restart()
    return len(entries)


def test_whatever_happens_every_offer_is_in_one_entry():
    assert sum(map(check, range(10))) > 50


@pytest.mark.exhaustive
def test_whatever_happens_every_offer_is_in_one_entry_for_many_seeds():
    for seed in range(10, 10_000):
        check(seed)
