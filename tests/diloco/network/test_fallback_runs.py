"""Runs that lose the coordinator's port and go on at its store: the same bits as those that never lost it."""

import itertools
import signal
import threading
from dataclasses import replace

import chex
import pytest

from jaxtrain.diloco import waiting_meeting
from jaxtrain.diloco.meeting_places import SharedMeeting, open_meeting
from jaxtrain.diloco.network import certificates
from jaxtrain.diloco.network.tcp_meeting import TcpMeeting
from jaxtrain.diloco.outer_exchange import Exchange
from jaxtrain.distributed import exit_codes
from jaxtrain.trainer.loop import train
from jaxtrain.trainer.session import Interrupted
from tests.diloco.archipelago import numbers
from tests.diloco.memory_meeting import MemoryMeeting, wait_until
from tests.diloco.network.served_log import Site, fall_back_at_once
from tests.diloco.test_background_offers import At
from tests.diloco.test_island_runs import MODES, Beside, Dies, built, islands, joined, pair, straight, with_meeting
from tests.tiers import slow_if

pytest.importorskip("cryptography", reason="comes with the extra .[diloco]")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    certificates.make(folder := tmp_path_factory.mktemp("keys"), range(2))
    return folder


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    fall_back_at_once(monkeypatch)
    monkeypatch.setattr(waiting_meeting, "PATIENCE_S", 0.05)


class Reached:
    """A run whose island has the port of a site, and its store; `shared`: as one of several processes does."""

    def __init__(self, run, site, shared=False):
        section = replace(run.config.diloco, meeting=f"tcp://{site.address},{site.place}", keys=str(site.keys))
        meeting = open_meeting(section)
        self.meeting = meeting._meeting  # behind what makes calls wait
        if section.overlap:
            self.meeting = self.meeting._meeting  # and what looks ahead
        self.exchange = Exchange(section, run.abstract, run.layout.axes, SharedMeeting(meeting) if shared else meeting,
                                 run.train_batches.tokens)
        self.run = joined(run, self.exchange)
        site.opened.append(self.meeting)

    def is_away(self):
        return not self.meeting._at_port.is_set()


@pytest.fixture
def site(tmp_path, keys):
    made = Site(tmp_path / "site", keys)
    yield made
    made.close()


def same(mode, site, attempts):
    """Both islands and the log end as without a cut, by what `attempts` make of the first island."""
    ((want, others), log), (one, two) = straight(mode), pair(mode)
    near = TcpMeeting(f"127.0.0.1:{site.served.port}", site.keys, 1)
    site.opened.append(near)
    other = Beside(with_meeting(two, near, 1))
    chex.assert_trees_all_equal(numbers(attempts(one)), want)
    chex.assert_trees_all_equal(numbers(other.ended().params), others)
    assert list(site.log.entries(site.log.trimmed, 0)) == log[site.log.trimmed:] and site.log.position == len(log)


def cut_and_back(reached, site, cut, back):
    """An observer that closes the port before a step, and opens it before another one, at which the island returns."""
    def again():
        site.proxy.close_port(False)
        wait_until(lambda: not reached.is_away())
    return At({cut: site.proxy.close_port, back: again})


def tiered(every, quick, *some):
    """Mark the cases that are in neither list `exhaustive`, and those of the second one `slow`."""
    return [pytest.param(*case, marks=() if case in quick else slow_if(case in some)) for case in every]


ALL = itertools.product([(1, None), (4, None), (4, 8), (2, 5)], MODES, [False, True])


@pytest.mark.parametrize("cut, mode, shared", tiered(
    ALL, [((4, 8), "int4", False), ((1, None), "sync", True)], ((4, 8), "streaming", False), ((4, 8), "gossip", True)),
    ids=str)
def test_an_island_without_its_port_goes_on_to_the_same_bits(tmp_path, site, cut, mode, shared, capsys):
    """From a step on; for good, or until another step."""
    def attempts(one):
        reached = Reached(one, site, shared)
        return train(reached.run, tmp_path / "run", observers=[cut_and_back(reached, site, *cut)])

    site.carry()
    same(mode, site, attempts)
    said = capsys.readouterr().err
    assert (said.count("continues at"), said.count("returns to it")) == (1, int(cut[1] is not None))


@pytest.mark.parametrize("mode, taken", tiered(
    itertools.product(MODES, [False, True]), [("sync", False)], ("int4", True), ("gossip", False)))
def test_an_island_that_is_stopped_at_the_store_goes_on_to_the_same_bits(tmp_path, site, mode, taken):
    """Stopped while nobody serves the store; its offer is taken there or made again at the port."""
    def stop():
        wait_until(lambda: site.names()["offers"])
        signal.raise_signal(signal.SIGTERM)

    def cut():
        site.proxy.close_port()
        threading.Thread(target=stop, daemon=True).start()

    def attempts(one):
        reached = Reached(one, site)
        with pytest.raises(Interrupted) as stopped:
            train(reached.run, tmp_path / "run", observers=[At({5: cut})])
        assert stopped.value.code == exit_codes.SAVED
        reached.meeting.close()
        if taken:
            site.carry()
        else:
            site.proxy.close_port(False)
        return train(Reached(one, site).run, tmp_path / "run")

    same(mode, site, attempts)


@pytest.mark.parametrize("mode, hook", tiered(
    itertools.product(MODES, ["on_batch", "on_dispatch"]), [("sync", "on_batch")], ("gossip", "on_dispatch")))
def test_an_island_that_is_killed_at_the_store_goes_on_at_the_port_to_the_same_bits(tmp_path, site, mode, hook):
    def attempts(one):
        reached = Reached(one, site)
        with pytest.raises(RuntimeError, match="killed"):
            train(reached.run, tmp_path / "run", observers=[Dies(9, hook), At({4: site.proxy.close_port})])
        assert reached.is_away()
        reached.meeting.close()
        site.proxy.close_port(False)
        return train(Reached(one, site).run, tmp_path / "run")

    site.carry()
    same(mode, site, attempts)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [0, 2])
def test_an_asynchronous_island_ends_with_the_same_bits(tmp_path, keys, overlap):
    """One alone: what becomes of two depends on the order in which their offers arrive."""
    site = Site(tmp_path / "site", keys, "async")
    site.carry()
    try:
        run = built(**islands(1, mode="async", compression="int4", overlap=overlap))
        calm = train(with_meeting(run, MemoryMeeting(1, "async")), tmp_path / "calm")
        reached = Reached(run, site)
        cut = train(reached.run, tmp_path / "cut", observers=[cut_and_back(reached, site, 4, 8)])
        chex.assert_trees_all_equal(numbers(cut), numbers(calm))
    finally:
        site.close()


def test_a_new_island_begins_at_the_store(tmp_path, site):
    """As it would at the port, with a snapshot and the entries after it."""
    site.carry()
    one, two = pair("sync")
    near = TcpMeeting(f"127.0.0.1:{site.served.port}", site.keys, 1)
    site.opened.append(near)
    begun = Reached(one, site)
    beside = Beside(with_meeting(two, near, 1))
    train(begun.run, tmp_path / "first")
    beside.ended()
    assert site.log.trimmed
    at_port = begun.exchange.begin(0, one.init())
    site.proxy.close_port()
    at_store = begun.exchange.begin(0, one.init())
    assert begun.is_away()
    chex.assert_trees_all_equal(numbers(at_store), numbers(at_port))
