"""The same bits on all islands, and what becomes of an island that is late, new, stopped or another's twin."""

from dataclasses import replace

import chex
import jax
import numpy as np
import pytest

from jaxtrain.diloco.meeting import Entry, Offer
from jaxtrain.diloco.meeting_places import MeetingAhead
from jaxtrain.diloco.outer_exchange import Exchange
from jaxtrain.errors import UserError
from jaxtrain.extensions import ema
from jaxtrain.train_step.optimizers import outer
from tests.diloco.archipelago import numbers, outer_state
from tests.diloco.memory_meeting import MemoryMeeting, OutOfReach
from tests.diloco.test_island_runs import rows_of
from tests.diloco.tiny_islands import agree, few, shared, tiny


def test_the_same_bits_on_all_islands_and_the_outer_parameters_as_their_own():
    found = few()
    found.train(9)
    agree(found)
    for state in found.states:
        chex.assert_trees_all_equal(numbers(state.params), outer_state(state)["params"])
    assert [entry.number for entry in found.meeting.log] == [1, 2, 3]
    assert found.meeting.sent == 3 * 3 * 40 * 4


def test_an_island_that_is_late_keeps_its_progress_and_offers_it_again():
    found = few(2)
    found.train(2)
    found.done += 1
    for i in range(2):  # both make the third step; the entry is made before the second one offers
        found.states[i], _ = found.steps[i](found.states[i], found.runs[i].sharded.place(rows_of(2, i)))
    found.states[0] = found.exchanges[0].offer(3, found.states[0])
    found.meeting.decide()
    before, behind = numbers(found.states[1].params), outer_state(found.states[1])["params"]
    found.states[0] = found.exchanges[0].finish(3, found.states[0])
    found.states[1] = found.exchanges[1].offer(3, found.states[1])
    assert len(found.meeting.log) == 1
    found.meeting.lose(0)  # so that the second entry is made of the late island alone
    offered, found.states[1] = found.states[1], found.exchanges[1].finish(3, found.states[1])
    assert [[offer.island for offer in entry.contributions] for entry in found.meeting.log] == [[0], [1]]
    assert found.meeting.log[1].contributions[0].base == 1
    # Its offer is its parameters moved by what the first entry moved the outer ones.
    moved = jax.tree.map(lambda mine, new, old: mine + (new - old), before, outer_state(found.states[0])["params"],
                         behind)
    content = np.frombuffer(found.meeting.content(found.meeting.log[1].contributions[0].sha256), np.float32)
    np.testing.assert_array_equal(content, np.concatenate([x.ravel() for x in jax.tree.leaves(moved)]))
    # Killed before it read any of that, and resumed, it finds both entries at once, and its offer in the second.
    killed = Exchange(found.exchanges[1].diloco, found.runs[1].abstract, found.runs[1].layout.axes, found.meeting)
    resumed = killed.finish(3, killed.begin(3, offered))
    chex.assert_trees_all_equal(numbers(resumed.params), numbers(found.states[1].params))
    chex.assert_trees_all_equal(outer_state(resumed), outer_state(found.states[1]))
    assert len(found.meeting.log) == 2


def test_progress_that_is_too_old_is_dropped():
    found = few(2, dropped=0)
    found.train(2)
    found.done += 1
    found.states[0] = found.exchanges[0].offer(3, found.states[0])
    found.meeting.decide()
    found.states[0] = found.exchanges[0].finish(3, found.states[0])
    found.states[1] = found.exchanges[1].finish(3, found.exchanges[1].offer(3, found.states[1]))
    agree(found)
    chex.assert_trees_all_equal(numbers(found.states[1].params), outer_state(found.states[0])["params"])
    assert len(found.meeting.log) == 1


@pytest.mark.parametrize("trimmed", [False, True])
def test_an_island_that_joins_begins_at_the_end_of_the_log(trimmed):
    found = few(2, snapshot_every=2)
    found.meeting.lose(1)
    state, exchange = found.states[0], found.exchanges[0]
    for step in range(1, 10):
        state, _ = found.steps[0](state, found.runs[0].sharded.place(rows_of(step, 0)))
        state = exchange.after(step, state)
    if trimmed:
        found.meeting.trim(3)
    assert found.meeting.snapshot()[0] == 2 and len(found.meeting.log) == 3
    joined = found.exchanges[1].begin(0, found.states[1])
    chex.assert_trees_all_equal(shared(joined), shared(state))
    chex.assert_trees_all_equal(numbers(joined.params), numbers(state.params))
    assert int(joined.step) == 0


def test_an_island_that_begins_again_makes_its_first_offers_again():
    """After a kill before the first checkpoint, its first steps are in the log once, whatever came since."""
    found = few(2, snapshot_every=2)
    found.train(9)
    again = few(2, into=found.meeting, snapshot_every=2)
    assert int(again.states[0].extras["outer"]["position"]) == 0
    again.train(9)
    assert len(found.meeting.log) == 3
    chex.assert_trees_all_equal(numbers(again.states), numbers(found.states))


@pytest.mark.slow
def test_one_that_joined_late_begins_again_where_it_joined():
    found = few(2)
    found.meeting.lose(1)
    alone, exchange = found.exchanges
    state = found.states[0]
    for step in range(1, 4):
        state, _ = found.steps[0](state, found.runs[0].sharded.place(rows_of(step, 0)))
        state = alone.after(step, state)
    joined = exchange.begin(0, found.states[1])
    exchange.finish(3, exchange.offer(3, joined), stopping=lambda step: True)
    alone.finish(6, alone.offer(6, state))
    assert [len(entry.contributions) for entry in found.meeting.log] == [1, 2]
    chex.assert_trees_all_equal(numbers(few(2, into=found.meeting).states[1]), numbers(joined))


def test_the_average_of_an_island_that_joins_begins_with_its_parameters():
    run, _ = tiny()
    found = few(2)
    found.meeting.lose(1)
    found.states[0] = found.exchanges[0].offer(3, found.states[0])
    moved = jax.tree.map(lambda x: x + 1, found.states[0].params)
    found.states[0] = found.exchanges[0].finish(3, replace(found.states[0], params=moved))
    start = run.init()
    own = jax.tree.map(lambda x: x - 1, start.params)  # not what the log has
    joined = found.exchanges[1].begin(0, replace(start, params=own, extras=start.extras | {"ema": ema.begin(own)}))
    chex.assert_trees_all_equal(numbers(joined.extras["ema"]), numbers(joined.params))
    chex.assert_trees_all_equal(numbers(joined.params), outer_state(found.states[0])["params"])


@pytest.mark.parametrize("rate, kind, start", [(0.5, "", 0.0), (0.7, "llama", 0.0), (0.7, "", 1.0)])
def test_an_island_of_another_config_or_beginning_is_refused(rate, kind, start):
    """It refuses itself where others' offers come with its own; the coordinator does before (test_coordinator.py)."""
    found, run = few(2), tiny()[0]
    other = replace(found.config, index=1, learning_rate=rate)
    found.exchanges[1] = Exchange(other, run.abstract, run.layout.axes, found.meeting, kind=kind)
    outer = found.states[1].extras["outer"]
    moved = jax.tree.map(lambda x: x + start, outer["params"])
    found.states[1] = replace(found.states[1], extras=found.states[1].extras | {"outer": outer | {"params": moved}})
    with pytest.raises(UserError, match=r"^diloco.index: island 1 has other outer parameters after entry 0 than this"):
        found.train(3)


def test_a_snapshot_of_another_outer_optimizer_is_refused():
    found = few(2, snapshot_every=1)
    found.train(3)
    other = few(1, into=MemoryMeeting(2), momentum=0.0).exchanges[0]
    other._meeting = found.meeting
    found.meeting.trim(2)
    with pytest.raises(UserError, match=r"^diloco.meeting: its snapshot is of another model or outer optimizer"):
        other.begin(0, tiny()[0].init())


def test_an_island_at_its_end_waits_for_its_open_offer_and_leaves():
    """However it is asked to stop: else its offer would be made again, which does nothing, and it would not leave."""
    found, looks = few(2, overlap=1), []
    meeting, (one, other), read = found.meeting, found.exchanges, found.meeting.entries
    found.states[0] = one.offer(3, found.states[0])

    def entries(after, wait):
        looks.append(after)
        if len(looks) == 2:
            found.states[1] = other.offer(3, found.states[1])
        if after == 1 and len(meeting.log) == 1:
            found.states[1] = other.offer(4, other.finish(4, found.states[1]), last=True)
        return read(after, 0)

    meeting.entries = entries
    one.after(4, found.states[0], last=True, stopping=lambda step: True)
    assert [[offer.last for offer in entry.contributions] for entry in meeting.log] == [[False] * 2, [True] * 2]


def test_one_that_joins_with_overlap_reads_contents_before_it_offers():
    found = few(2)
    found.train(3)
    assert MeetingAhead(found.meeting).content(found.meeting.log[0].contributions[0].sha256)


def test_with_overlap_the_others_contents_are_fetched_ahead_and_not_the_island_s_own():
    found, taken = few(3), []
    found.train(3)
    (entry,), content = found.meeting.log, found.meeting.content
    found.meeting.content = lambda sha256: taken.append(sha256) or content(sha256)
    ahead, (own, *others) = MeetingAhead(found.meeting), entry.contributions
    ahead.offer(own, content(own.sha256))
    assert [ahead.content(offer.sha256) for offer in others] == [content(offer.sha256) for offer in others]
    assert taken == [offer.sha256 for offer in others]


def test_what_the_meeting_refuses_is_left_to_whoever_asks_in_earnest():
    """The thread that looks ahead has no traceback to print."""
    def refused(*given):
        raise UserError("diloco.meeting", "it has another log", "give another one")
    found = few(2)
    found.train(3)
    own = found.meeting.log[0].contributions[0]
    found.meeting.entries = refused
    assert MeetingAhead(found.meeting)._look(own) is None


def test_an_island_that_leaves_is_not_waited_for():
    found = few(2)
    found.train(3)
    found.states[1] = found.exchanges[1].offer(4, found.states[1], last=True)
    found.states[0] = found.exchanges[0].finish(4, found.exchanges[0].offer(4, found.states[0]))
    found.states[0] = found.exchanges[0].finish(5, found.exchanges[0].offer(5, found.states[0]))
    assert [len(entry.contributions) for entry in found.meeting.log] == [2, 2, 1]


def test_an_exchange_that_is_left_open_goes_on_after_a_restart():
    found = few(2)
    found.train(2)
    stopped = found.exchanges[0].after(3, found.states[0], stopping=lambda step: True)
    assert int(stopped.extras["outer"]["open"]) == outer.DUE
    again = few(2).exchanges[0]
    again._meeting = found.meeting
    found.states[1] = found.exchanges[1].offer(3, found.states[1])
    found.states[1] = found.exchanges[1].finish(3, found.states[1])
    found.states[0] = again.begin(3, stopped)
    agree(found)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "overlap"), [("sync", 0), ("sync", 1), ("gossip", 1)])
def test_one_that_is_late_and_stopped_offers_again_what_it_would_have(mode, overlap):
    """Its codec's earlier losses count; nobody answers when it reads the second entry without it, or offers again, or
    waits for the entry of that offer, which is not blended with steps that went on: there were none."""
    def late(call="", number=0):
        found, here = few(2, mode, compression="int4", overlap=overlap), 6 + overlap
        found.train(3 + overlap)
        one, two = found.exchanges
        for i in range(2):
            found.states[i], _ = found.steps[i](found.states[i], found.runs[i].sharded.place(rows_of(3, i)))
        for _ in range(2):
            found.states[0] = one.offer(6, found.states[0])
            found.meeting.decide()
            found.states[0] = one.finish(6, found.states[0])
        found.meeting.lose(0)
        state = two.offer(6, found.states[1])
        state = replace(state, params=jax.tree.map(lambda p: p + 0.125 * overlap, state.params))
        if call:
            two._meeting = OutOfReach(found.meeting, call, number, what=call)
            state = two.after(here, state, stopping=lambda step: True)
            left = outer_state(state)
            assert (left["open"], left["position"]) == (outer.DUE, 2 if call == "content" else 3)
            two = Exchange(two.diloco, found.runs[1].abstract, found.runs[1].layout.axes, found.meeting)
            state = two.begin(here, state)
        else:
            state = two.finish(here, state)
        assert [len(entry.contributions) for entry in found.meeting.log] == [2, 1, 1, 1]
        return numbers(state), found.meeting.log

    (want, log), *others = late(), late("offer", 1), late("entries", 2), *(
        [late("content", 2)] if mode == "sync" else [])  # of gossip it reads no contents of entries without it
    for got, again in others:
        chex.assert_trees_all_equal(got, want)
        assert again == log


def test_an_asynchronous_island_waits_for_its_own_entry_however_many_come_before():
    found = few(2, "async", momentum=0.0)
    found.train(2)
    meeting, exchange = found.meeting, found.exchanges[0]
    held = []
    meeting.offer, offer = lambda *offered: held.append(offered), meeting.offer  # not decided yet
    state = exchange.offer(3, found.states[0])
    offer(*offered_by(found, 1))
    state = exchange.finish(3, state, stopping=lambda step: True)
    assert (int(state.extras["outer"]["position"]), int(state.extras["outer"]["open"])) == (1, 1)
    assert len(held) == 1
    offer(*held[0])
    meeting.offer = offer
    state = few(2, "async", into=meeting, momentum=0.0).exchanges[0].begin(3, state)  # after a restart
    assert (int(state.extras["outer"]["position"]), int(state.extras["outer"]["open"])) == (2, 0)
    assert [entry.contributions[0].island for entry in meeting.log] == [1, 0]
    chex.assert_trees_all_equal(numbers(state.params), outer_state(state)["params"])


def offered_by(found, island):
    """Return what an island would offer now."""
    taken = []

    class Taker:
        offer = staticmethod(lambda *offered: taken.append(offered))

    found.exchanges[island]._meeting = Taker
    found.exchanges[island].offer(3, found.states[island])
    return taken[0]


def test_asynchronous_islands_apply_the_same_entries_and_drop_what_is_refused():
    found = few(4, "async", max_age=2, momentum=0.0)
    states, exchanges = found.states, found.exchanges
    for step, island in enumerate([0, 1, 0, 2, 0, 0, 1, 2], 1):  # islands of very unequal speed
        states[island], _ = found.steps[0](states[island], found.runs[0].sharded.place(rows_of(step, island)))
        states[island] = exchanges[island].finish(3, exchanges[island].offer(3, states[island]))
        chex.assert_trees_all_equal(numbers(states[island].params), outer_state(states[island])["params"])
    assert [len(entry.refused) for entry in found.meeting.log] == [0, 0, 0, 1, 0, 0, 1, 1]
    new = exchanges[3].begin(0, tiny()[0].init())
    chex.assert_trees_all_equal(shared(new), shared(states[2]))


@pytest.mark.parametrize(("mode", "number", "islands"), [("async", 1, (0, 1)), ("sync", 2, (1,))])
def test_a_coordinator_of_the_other_mode_is_refused(mode, number, islands):
    offers = tuple(Offer(island, 0, 0, 1.0, "") for island in islands)
    with pytest.raises(UserError, match=f"diloco.mode: it is {mode}, and the coordinator made entry {number} in"):
        few(2, mode, momentum=0.0).exchanges[0]._replica.updated(Entry(number, 0, offers), {"params": np.zeros(2)})


def test_two_islands_of_one_index_are_told(capsys):
    found = few(1)
    other = few(1, into=found.meeting)
    moved, _ = other.steps[0](other.exchanges[0].begin(0, other.states[0]), other.runs[0].sharded.place(rows_of(1, 0)))
    mine, twin = found.exchanges[0], other.exchanges[0]
    mine.finish(3, mine.offer(3, mine.begin(0, found.states[0])))
    assert not capsys.readouterr().err
    twin.finish(3, twin.offer(3, moved))
    assert capsys.readouterr().err.startswith("diloco.index: entry 1 has an offer of island 0 that this run did not")
