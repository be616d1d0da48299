"""An island that continues at the store while the port is out of reach, and returns: one log, each offer in it once."""

import math
import os
import re
import threading

import pytest

from jaxtrain.config.sections.diloco_keys import DilocoConfig
from jaxtrain.diloco import folder_meeting, waiting_meeting
from jaxtrain.diloco.folder_meeting import FolderMeeting
from jaxtrain.diloco.meeting import Trimmed, Unanswered
from jaxtrain.diloco.meeting_places import open_meeting
from jaxtrain.diloco.network import certificates, fallback_meeting, meeting_server
from jaxtrain.diloco.network.fallback_meeting import FallbackMeeting
from jaxtrain.errors import UserError
from tests.diloco.memory_meeting import wait_until
from tests.diloco.network.served_log import Site, fall_back_at_once, offered

pytest.importorskip("cryptography", reason="comes with the extra .[diloco]")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    certificates.make(folder := tmp_path_factory.mktemp("keys"), range(3))
    return folder


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    fall_back_at_once(monkeypatch)
    monkeypatch.setitem(FolderMeeting.__init__.__kwdefaults__, "sign", 1e9)  # one look for a coordinator, at once


@pytest.fixture
def site(tmp_path, keys):
    made = Site(tmp_path, keys)
    yield made
    made.close()


class Said:
    """The text that was printed on stderr so far."""

    def __init__(self, capsys):
        self._capsys, self.text = capsys, ""

    def has(self, pattern):
        self.text += self._capsys.readouterr().err
        return len(re.findall(pattern, self.text))


@pytest.fixture
def said(capsys):
    return Said(capsys)


AWAY = r"127.0.0.1:\d+: the coordinator of the islands is out of reach \(.+\); island 0 continues at "
BACK = r"127.0.0.1:\d+: the coordinator of the islands answers again, and island 0 returns to it from "


def began(call):
    """Make a call on a thread; return that, and where its answer will be."""
    found = []

    def make():
        try:
            found.append(call())
        except Exception as error:
            found.append(error)
    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    return thread, found


def answer(begun):
    begun[0].join(600)
    (found,) = begun[1]
    if isinstance(found, Exception):
        raise found
    return found


def exchanged(site, meeting, base, content=None):
    """Offer, read the entry and its contents, and leave a snapshot."""
    mine, others = content or b"mine %d" % base, b"others %d" % base
    meeting.offer(*offered(0, base, mine))
    assert site.log.taken(offered(0, base, mine)[0]), "it is in the log when the call returns, on either way"
    site.other(base, others)
    while not (found := meeting.entries(base, 0.2)):
        pass
    assert list(found) == list(site.log.entries(base, 0))
    assert [meeting.content(offer.sha256) for offer in found[0].contributions] == [mine, others]
    meeting.put_snapshot(base + 1, b"state %d" % base)
    wait_until(lambda: site.log.newest_snapshot() and site.log.newest_snapshot()[0] == base + 1)
    assert meeting.snapshot() == (base + 1, b"state %d" % base)


def test_an_island_goes_on_at_the_store_while_the_port_is_out_of_reach_and_returns(site, said):
    site.carry()
    meeting = site.island()
    exchanged(site, meeting, 0)
    site.proxy.close_port()
    for base in (1, 2):
        exchanged(site, meeting, base)
    assert said.has(AWAY + re.escape(f"{site.place}, and tries the port again every 0 s\n")) == 1
    with pytest.raises(Trimmed):
        meeting.entries(0, 0)
    site.proxy.close_port(False)
    wait_until(lambda: said.has(BACK + re.escape(site.place)))
    up = site.proxy.up
    exchanged(site, meeting, 3, content=(large := os.urandom(2**20)))
    assert site.proxy.up > up + len(large)
    site.proxy.close_port()
    exchanged(site, meeting, 4)
    assert said.has(AWAY) == 2 and said.has(BACK) == 1
    assert [[(offer.island, offer.base) for offer in entry.contributions] for entry in site.log.entries(4, 0)] == [
        [(0, 4), (1, 4)]]
    assert [site.log._coordinator.counts[island, "entries"] for island in (0, 1)] == [5, 5]
    wait_until(lambda: {name: len(found) for name, found in site.names().items()} == {
        "offers": 0, "contents": 2, "entries": 1, "snapshots": 2})


@pytest.mark.slow
def test_the_store_may_be_object_storage_that_fails_now_and_then(tmp_path, keys, bucket, network, said):
    network.shake(3, share=0.1, faults=("error", "busy", "reset"), methods=("GET", "PUT", "HEAD"))
    made = Site(tmp_path, keys, place=f"{bucket}/islands")
    made.carry()
    try:
        meeting = made.island()
        exchanged(made, meeting, 0)
        made.proxy.close_port()
        exchanged(made, meeting, 1)
        exchanged(made, meeting, 2)
        made.proxy.close_port(False)
        wait_until(lambda: said.has(BACK))
        exchanged(made, meeting, 3)
        assert said.has(AWAY) == 1 and len(network.faults) > 5
    finally:
        made.close()


def test_an_offer_whose_answer_was_lost_is_made_at_the_store_again_and_is_one(site, monkeypatch):
    meeting, take = site.island(), meeting_server.MeetingServer._offer

    def lost(server, island, header, body):
        found = take(server, island, header, body)
        if "sent" in header:
            site.proxy.close_port()
        return found

    monkeypatch.setattr(meeting_server.MeetingServer, "_offer", lost)
    offering = began(lambda: meeting.offer(*offered(0, 0, b"mine")))
    wait_until(lambda: site.names()["offers"])
    assert site.log.taken(offered(0, 0, b"mine")[0]), "it arrived by the port"
    site.carry()
    answer(offering)
    site.other(0, b"others")
    (entry,) = meeting.entries(0, 60)
    assert [offer.base for offer in entry.contributions] == [0, 0] and meeting.content(
        entry.contributions[0].sha256) == b"mine"
    assert meeting.entries(1, 0) == [] and site.log.position == 1 and not site.names()["offers"]


def test_an_offer_that_nobody_takes_at_the_store_is_made_at_the_port_once_that_answers(site, said):
    """The coordinator finds it at the store later, when its island has left."""
    meeting = site.island()
    site.proxy.close_port()
    offering = began(lambda: meeting.offer(*offered(0, 0, b"mine", last=True)))
    wait_until(lambda: site.names()["offers"])
    assert offering[0].is_alive() and not site.log.taken(offered(0, 0, b"mine")[0])
    site.proxy.close_port(False)
    answer(offering)
    site.other(0, b"others")
    site.bridge.look()
    assert not site.names()["offers"]
    site.other(1, b"others, alone")
    assert [[offer.island for offer in entry.contributions] for entry in site.log.entries(0, 0)] == [[0, 1], [1]]
    assert said.has(AWAY) == said.has(BACK) == 1


def test_an_offer_that_is_refused_at_the_store_is_not_made(site):
    """Else an island that has returned to the port by then would wait there for an entry that nobody will make."""
    site.carry()
    meeting = site.island()
    site.log.offer(*offered(1, 0, b"others", same="1" * 64))
    site.proxy.close_port()
    with pytest.raises(UserError, match="island 0: its outer parameters after entry 0, or its config, are not those"):
        meeting.offer(*offered(0, 0, b"mine", same="2" * 64))
    meeting.offer(*offered(0, 0, b"mine", same="1" * 64))
    assert [entry.number for entry in meeting.entries(0, 60)] == [1]


def test_an_entry_that_was_read_at_the_port_is_waited_for_at_the_store(site, said):
    """So are its contents, and what follows from it: whoever finds a snapshot there expects its entry, too."""
    meeting, far = site.island(), FolderMeeting(site.place, 2, sign=1e9)
    meeting.offer(*offered(0, 0, b"mine"))
    site.other(0, b"others")
    (entry,) = meeting.entries(0, 60)
    site.proxy.close_port()
    getting = began(lambda: meeting.content(entry.contributions[1].sha256))
    keeping = began(lambda: meeting.put_snapshot(1, b"state"))
    wait_until(lambda: not meeting._at_port.is_set())
    assert list(far.entries(0, 0.2)) == [] and not site.names()["snapshots"]
    assert getting[0].is_alive() and keeping[0].is_alive()
    site.carry()
    assert answer(getting) == b"others" and list(far.entries(0, 60)) == [entry]
    answer(keeping)
    far.close()
    assert said.has(AWAY) == 1, "not once a thread"


def test_a_snapshot_that_the_port_has_is_waited_for_at_the_store(site):
    """As a new island needs it, which was told at the port that the log begins later."""
    for base in range(3):
        site.log.offer(*offered(0, base, b"mine"))
        site.other(base, b"others %d" % base)
        site.log.put_snapshot(base + 1, b"state %d" % base)
    meeting = site.island()
    with pytest.raises(Trimmed):
        meeting.entries(0, 0)
    site.proxy.close_port()
    asking = began(meeting.snapshot)
    wait_until(lambda: not meeting._at_port.is_set())
    asking[0].join(0.3)
    assert asking[0].is_alive(), "the store has none yet"
    site.carry()
    assert answer(asking) in [(2, b"state 1"), (3, b"state 2")], "both are newer, and both are there soon"


def test_a_call_at_the_store_goes_back_to_the_port(site):
    """Whatever it is, and without a coordinator at the store."""
    meeting = site.island()
    site.log.offer(*offered(0, 0, b"mine"))
    site.other(0, b"others")
    (entry,) = meeting.entries(0, 60)
    for call in (lambda: meeting.content(entry.contributions[0].sha256), lambda: meeting.put_snapshot(1, b"state"),
                 lambda: meeting.entries(0, 60)):
        site.proxy.close_port()
        calling = began(call)
        wait_until(lambda: not meeting._at_port.is_set())
        site.proxy.close_port(False)
        answer(calling)
    assert site.log.snapshot() == (1, b"state")


def test_a_certificate_that_is_refused_is_an_error_and_no_reason_to_fall_back(site, tmp_path, said):
    others = tmp_path / "others"
    certificates.make(others, range(1))
    strange = FallbackMeeting(site.address, others, site.place, 0, 2)
    with pytest.raises(UserError, match="the coordinator's certificate is not accepted here"):
        strange.entries(0, 0)
    strange.close()
    assert not said.has(AWAY)
    meeting = site.island()
    site.proxy.close_port()
    waiting = began(lambda: meeting.entries(0, 1e6))
    wait_until(lambda: not meeting._at_port.is_set())
    meeting._port._tls = certificates.context(others, "island-0")
    site.proxy.close_port(False)
    for asked in (lambda: answer(waiting), lambda: meeting.entries(0, 0)):
        with pytest.raises(UserError, match="the coordinator's certificate is not accepted here"):
            asked()


def test_an_island_says_that_nobody_serves_the_store_and_tries_both(tmp_path, keys, said, monkeypatch):
    """At once, while the port answers, and again when that does not."""
    made = Site(tmp_path, keys)
    try:
        (tmp_path / "store" / folder_meeting.SERVED).unlink()
        serve = re.escape(f"jaxtrain diloco serve --workdir=DIR --address=0.0.0.0:{made.proxy.port} --keys=DIR "
                          f"--store={made.place} --islands=2\n")
        meeting = made.island()
        store = re.escape(made.place)
        wait_until(lambda: said.has(f"{store}: no coordinator serves it, so island 0 cannot go on there if "
                                    f"{made.address} is out of reach; start the coordinator with {serve}"))
        assert meeting.entries(0, 0) == []
        for _ in range(6):
            meeting._store._look_for_coordinator()
        assert said.has("no coordinator serves it") == 1, "that is said once"
        made.proxy.close_port()
        with pytest.raises(Unanswered):  # so that a run that is told to stop need not wait
            meeting.entries(0, 0.5)
        wait_until(lambda: said.has(f"{store}: no coordinator serves it either, so island 0 waits for the others at "
                                    f"its next exchange, and tries both; start one with {serve}"))
        for _ in range(6):
            meeting._store._look_for_coordinator()
        assert said.has("no coordinator serves it either") == 3, "that is said again and again"
        waiting = began(lambda: meeting.entries(0, 1e6))
        made.proxy.close_port(False)
        made.log.offer(*offered(0, 0, b"mine"))
        made.other(0, b"others")
        assert [entry.number for entry in answer(waiting)] == [1] and said.has(BACK) == 1
        made.proxy.close_port()
        made.bridge._signed = -math.inf
        made.bridge.look()
        meeting._store._look_for_coordinator()
        assert said.has(f"{store}: a coordinator serves it now\n") == 1
    finally:
        made.close()


@pytest.mark.parametrize("away", [False, True])
def test_a_store_of_another_log_is_refused(site, away):
    """At the port as soon as it is known, and at the store before anything is read there."""
    meeting = site.island()
    wait_until(lambda: meeting._store.log)
    assert meeting._store.log == site.log.name and meeting.entries(0, 0) == []
    with open(f"{site.place}/log", "w") as file:
        file.write("0" * 32)
    if away:
        meeting._store.log = ""  # it was out of reach until now
        site.proxy.close_port()
    else:
        meeting._store.log = "0" * 32
    with pytest.raises(UserError) as error:
        meeting.entries(0, 60)
    assert f"{error.value}" == (f"diloco.meeting: {site.place} has another log than the coordinator at "
                                f"{site.address}; give the --store of that coordinator")


def failing(*given):
    raise UserError("s3://bucket", "cannot be read: TimeoutError, in 8 attempts",
                    "check that the store is up")


def test_where_both_are_out_of_reach_an_island_says_so_and_tries_both(site, said, monkeypatch):
    meeting = site.island()
    assert meeting.entries(0, 0) == []
    wait_until(lambda: meeting._store._quiet)  # its only look for a coordinator is over
    monkeypatch.setattr(fallback_meeting, "TELL_S", 0.0)
    monkeypatch.setattr(meeting._store._store, "read", failing)
    site.proxy.close_port()
    waiting = began(lambda: meeting.entries(0, 1e6))
    both = (r"127.0.0.1:\d+: the coordinator of the islands is out of reach \(.+\), and so is " + re.escape(site.place)
            + r" \(s3://bucket: cannot be read: TimeoutError, in 8 attempts; check that the store is up\); island 0 "
            r"tries both\n")
    wait_until(lambda: said.has(both) > 1)
    assert not said.has("trying again"), "one sentence for both"
    site.proxy.close_port(False)
    site.log.offer(*offered(0, 0, b"mine"))
    site.other(0, b"others")
    assert [entry.number for entry in answer(waiting)] == [1]
    site.proxy.close_port()
    monkeypatch.setattr(fallback_meeting, "PATIENCE_S", 0.5)
    with pytest.raises(OSError, match="cannot be read: TimeoutError"):
        meeting.entries(1, 1e6)


def test_a_store_that_is_down_while_the_port_answers_is_said_once(site, said, monkeypatch):
    """And an island begins without it; what cannot work at all is refused at once."""
    monkeypatch.setattr(folder_meeting._Store, "write", failing)
    monkeypatch.setattr(folder_meeting._Store, "names", failing)
    monkeypatch.setitem(FolderMeeting.__init__.__kwdefaults__, "sign", 0.01)
    meeting = site.island()
    assert meeting.entries(0, 0) == []
    down = "s3://bucket: cannot be read: TimeoutError, in 8 attempts; check that the store is up; trying again\n"
    wait_until(lambda: said.has(down))
    looks = []
    monkeypatch.setattr(folder_meeting._Store, "write", lambda *given: looks.append(given) or failing())
    wait_until(lambda: len(looks) > 2)
    assert said.has(down) == 1
    monkeypatch.undo()
    wait_until(lambda: not meeting._store._is_lost)
    with pytest.raises(UserError, match="cannot be used"):
        FallbackMeeting(site.address, site.keys, "gibberish://bucket", 0, 2)


def test_while_neither_answers_an_island_may_stop(site, monkeypatch):
    monkeypatch.setattr(waiting_meeting, "PATIENCE_S", 0.0)
    before = threading.enumerate()
    site.proxy.close_port()
    meeting = open_meeting(DilocoConfig(count=2, meeting=f"tcp://{site.address}, {site.place}", keys=str(site.keys)))
    reached = meeting._meeting
    assert isinstance(reached, FallbackMeeting)
    with pytest.raises(Unanswered):
        meeting.offer(*offered(0, 0, b"mine"))
    wait_until(lambda: site.names()["offers"])
    with pytest.raises(Unanswered):
        meeting.offer(*offered(0, 0, b"mine"))
    reached.close()
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == "islands-call" and one not in before])


ONE = "give tcp://HOST:PORT,STORE, with the coordinator's --store, or one of the two alone"


@pytest.mark.parametrize(("meeting", "told"), [
    ("tcp://a:1,tcp://b:2", f"it names two ports, and a coordinator has one; {ONE}"),
    ("tcp://a:1,", f"'tcp://a:1,' has an empty part; {ONE}"),
    ("tcp://a:1,,/store", f"'tcp://a:1,,/store' has an empty part; {ONE}"),
    (",/store", f"',/store' has an empty part; {ONE}"),
    (",", f"',' has an empty part; {ONE}"),
    (" ", f"' ' has an empty part; {ONE}"),
    ("/store,tcp://a:1", "a comma divides two places, and the first one, /store, is not tcp://HOST:PORT; " + ONE),
    ("/a,/b", "a comma divides two places, and the first one, /a, is not tcp://HOST:PORT; " + ONE),
    ("tcp://a:1,/b,/c", f"it names 3 places; {ONE}"),
])
def test_mistakes_in_the_list_of_places_are_one_sentence(meeting, told):
    with pytest.raises(UserError) as error:
        open_meeting(DilocoConfig(count=2, meeting=meeting, keys="keys" if "tcp" in meeting else ""))
    assert f"{error.value}" == f"diloco.meeting: {told}"


@pytest.mark.parametrize(("meeting", "told"), [
    ("tcp://a,/store", "diloco.meeting: tcp://a has no port or no host; give tcp://HOST:PORT"),
    ("tcp://a:1,b:2", "diloco.meeting: b:2 is not a coordinator, a folder or object storage; give"),
    ("tcp://a:1,http://b", "diloco.meeting: http://b is not a coordinator, a folder or object storage; give"),
    ("tcp://a:1,/store", "diloco.keys: none/ca.pem is not there; make"),
])
def test_each_place_is_checked_as_if_it_were_the_only_one(meeting, told):
    with pytest.raises(UserError, match=re.escape(told)):
        open_meeting(DilocoConfig(count=2, meeting=meeting, keys="none"))
    with pytest.raises(UserError, match=r"diloco\.keys: tcp://a:1,/store needs certificates"):
        DilocoConfig(count=2, meeting="tcp://a:1,/store")
