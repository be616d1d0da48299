"""The log as islands reach it by TCP: what is offered, what is read, and what happens when connections are cut."""

import hashlib
import itertools
import os
import socket
import ssl
import stat
import threading
import time
from types import SimpleNamespace

import pytest

from jaxtrain.config.sections.diloco_keys import DilocoConfig
from jaxtrain.diloco import waiting_meeting
from jaxtrain.diloco.coordinator import Policy
from jaxtrain.diloco.meeting import Trimmed, Unanswered
from jaxtrain.diloco.meeting_places import open_meeting
from jaxtrain.diloco.network import certificates, frames, meeting_server, tcp_meeting
from jaxtrain.diloco.network.meeting_server import MeetingServer
from jaxtrain.diloco.network.tcp_meeting import TcpMeeting
from jaxtrain.diloco.outer_log import OuterLog
from jaxtrain.errors import UserError
from tests.diloco.network.cutting_proxy import CuttingProxy
from tests.diloco.network.served_log import Served, offered

pytest.importorskip("cryptography", reason="comes with the extra .[diloco]")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    assert certificates.make(folder, range(3)) == ["ca", "coordinator", "island-0", "island-1", "island-2"]
    return folder


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(tcp_meeting, "PAUSE", (0.01, 0.05))


@pytest.fixture
def served(tmp_path, keys):
    made = Served(tmp_path / "log", keys, Policy(islands=2))
    yield made
    made.stop()


@pytest.fixture
def island(served, keys):
    meetings = []

    def make(number, port=None, **given):
        meetings.append(TcpMeeting(f"127.0.0.1:{port or served.port}", keys, number,
                                   **{"patience": 20.0, "silence": 5.0, **given}))
        return meetings[-1]

    yield make
    for meeting in meetings:
        meeting.close()


def test_islands_read_the_log_that_their_offers_make(island, served):
    one, two, large = island(0), island(1), os.urandom(3 * frames.PART + 5)
    one.offer(*offered(0, 0, large, steps=10))
    assert one.entries(0, 0) == [] and one.snapshot() is None
    one.offer(*offered(0, 0, b"another content of the same offer"))
    served.stop()
    served.start()  # what was offered is still open
    two.offer(*offered(1, 0, b""))
    (entry,) = one.entries(0, 5)
    assert entry == two.entries(0, 5)[0] and [offer.steps for offer in entry.contributions] == [10, 0]
    assert [two.content(offer.sha256) for offer in entry.contributions] == [large, b""]
    with pytest.raises(Trimmed):
        two.content("0" * 64)
    with pytest.raises(UserError, match=r"it has 1 entries, and an island had 2"):
        one.entries(2, 0)


def test_an_entry_wakes_who_waits_for_it(island):
    one, two, found = island(0), island(1), []
    one.offer(*offered(0, 0, b"one"))
    waiting = threading.Thread(target=lambda: found.extend(one.entries(0, 30)))
    waiting.start()
    begun = time.monotonic()
    two.offer(*offered(1, 0, b"two"))
    waiting.join(20)
    assert found and time.monotonic() - begun < 10


def test_snapshots_free_what_stands_before_the_one_before(island, served):
    one, two = island(0), island(1)
    for base in range(3):
        for number, meeting in enumerate((one, two)):
            meeting.offer(*offered(number, base, b"%d %d" % (base, number)))
        two.put_snapshot(base + 1, b"state %d" % base)
    one.put_snapshot(2, b"an older one")
    assert one.snapshot() == (3, b"state 2")
    with pytest.raises(Trimmed, match="begins after entry 2"):
        one.entries(1, 0)
    assert [entry.number for entry in one.entries(2, 0)] == [3]
    assert len(list((served.folder / "contents").iterdir())) == 2 and not list((served.folder / "partial").iterdir())


def test_a_transfer_that_is_cut_goes_on_where_it_was(island, served, monkeypatch):
    content, size = os.urandom(12 * frames.PART), frames.PART
    monkeypatch.setattr(tcp_meeting, "PAUSE", (0.3, 0.3))  # time to take in what had come before the cut
    with CuttingProxy(served.port) as proxy:
        one, two = island(0, proxy.port), island(1, proxy.port)
        proxy.cut_after = [11 * size // 2, 9 * size // 2, None]
        one.offer(*offered(0, 0, content))
        assert proxy.cuts == 2 and len(content) < proxy.up < 1.6 * len(content), "from the start it would be 1.8"
        two.offer(*offered(1, 0, b"two"))
        two.close()
        two = island(1, proxy.port)
        proxy.down, proxy.cut_after = 0, [11 * size // 2, 9 * size // 2, None]
        assert two.content(hashlib.sha256(content).hexdigest()) == content
        assert proxy.cuts == 4 and len(content) < proxy.down < 1.6 * len(content)


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_transfer_of_more_time_than_its_patience_may_be_cut(island, served, monkeypatch, way):
    """Each answer takes 100 s: what counts is how long ago the last one was, not when the transfer began."""
    content, receive, clock = os.urandom(12 * frames.PART), frames.receive, [0.0]

    def slow(line):
        answer = receive(line)
        clock[0] += 100
        return answer

    if way == "down":
        island(0).offer(*offered(0, 0, content))
        island(1).offer(*offered(1, 0, b"two"))
    with CuttingProxy(served.port) as proxy:
        monkeypatch.setattr(tcp_meeting, "PAUSE", (0.3, 0.3))
        monkeypatch.setattr(tcp_meeting, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        monkeypatch.setattr(tcp_meeting, "frames", SimpleNamespace(send=frames.send, receive=slow, PART=frames.PART))
        meeting = island(0 if way == "up" else 1, proxy.port, patience=250.0)
        proxy.cut_after = [19 * frames.PART // 2, None]
        if way == "up":
            meeting.offer(*offered(0, 0, content))
        else:
            assert meeting.content(hashlib.sha256(content).hexdigest()) == content
        assert proxy.cuts == 1 and clock[0] > 2 * 250


def test_a_content_that_was_damaged_is_sent_again(island, served):
    offer, content = offered(0, 0, os.urandom(2 * frames.PART))
    served.log.begin(0, offer.sha256, b"other bytes")
    island(0).offer(offer, content)
    assert served.log.content(offer.sha256) == content


def test_a_frame_that_was_changed_is_no_frame():
    ends = socket.socketpair()
    frames.send(ends[0], {"op": "get"}, b"12345")
    sent = bytearray(ends[1].recv(1000))
    for position in (0, 5, len(sent) - 1):
        wrong = bytearray(sent)
        wrong[position] ^= 1
        ends = socket.socketpair()
        ends[0].sendall(wrong)
        with pytest.raises(frames.Damaged):
            frames.receive(ends[1])
    ends = socket.socketpair()
    ends[0].sendall(sent)
    assert frames.receive(ends[1]) == ({"op": "get"}, b"12345")
    with pytest.raises(ValueError, match="too large"):
        frames.send(ends[0], {}, bytes(2**24))


def test_keys_are_private_and_are_made_once(keys):
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys.glob("*.key")} == {0o600}
    before = (keys / "island-0.pem").read_bytes()
    assert certificates.make(keys, range(3)) == [] and before == (keys / "island-0.pem").read_bytes()


def test_wrong_certificates_are_one_sentence(island, served, keys, tmp_path):
    others = tmp_path / "others"
    certificates.make(others, range(2))
    with pytest.raises(UserError, match=r"the coordinator's certificate is not accepted here .*; make certificates by"):
        TcpMeeting(f"127.0.0.1:{served.port}", others, 0).snapshot()
    (others / "ca.pem").write_bytes((keys / "ca.pem").read_bytes())  # now it trusts the coordinator
    with pytest.raises(UserError, match=r"does not accept this island's certificate \(unknown ca\)"):
        TcpMeeting(f"127.0.0.1:{served.port}", others, 0).snapshot()
    with pytest.raises(UserError, match="the certificate is of island 1"):
        island(1).offer(*offered(0, 0, b""))
    with pytest.raises(UserError, match=r"diloco.meeting: tcp://host has no port or no host; give tcp://HOST:PORT"):
        TcpMeeting("host", keys, 0)
    with pytest.raises(UserError, match=r"--address: host does not end with a port; give HOST:PORT, such as"):
        MeetingServer(None, "host", None)
    with pytest.raises(UserError, match=r"diloco.keys: .*island-7.pem is not there"):
        island(7)
    (others / "ca.key").unlink()
    with pytest.raises(UserError, match=r"has the authority's ca.pem and not its ca.key, which signs"):
        certificates.make(others, range(3))
    with pytest.raises(UserError, match="--output: /dev/null cannot be used"):
        certificates.make("/dev/null", range(3))
    (others / "island-1.key").chmod(0o644)
    with pytest.raises(UserError, match="can be read by others"):
        TcpMeeting(f"127.0.0.1:{served.port}", others, 1)


def test_an_island_cannot_pose_as_the_coordinator(tmp_path, keys, served):
    log = OuterLog(tmp_path / "other", Policy())
    tls = certificates.context(keys, certificates.COORDINATOR)
    tls.load_cert_chain(keys / "island-0.pem", keys / "island-0.key")
    server = MeetingServer(log, "127.0.0.1:0", tls)
    threading.Thread(target=server.accept, daemon=True).start()
    with pytest.raises(UserError, match="the coordinator's certificate is not accepted here"):
        TcpMeeting(f"127.0.0.1:{server.port}", keys, 1).snapshot()
    server.stop()
    log.close()


def test_strangers_and_nonsense_change_nothing(island, served, keys):
    for nonsense in (b"GET / HTTP/1.0\r\n\r\n", b"", os.urandom(500)):
        with socket.create_connection(("127.0.0.1", served.port)) as line:
            line.sendall(nonsense)
    tls = certificates.context(keys, "island-0")
    for sent in (os.urandom(200), frames._START.pack(b"JTi1", 2**31, 2**31, bytes(32))):
        with (socket.create_connection(("127.0.0.1", served.port)) as plain,
              tls.wrap_socket(plain, server_hostname=certificates.COORDINATOR) as line):
            frames.receive(line)
            line.sendall(sent)
            with pytest.raises((EOFError, OSError)):
                frames.receive(line)
    with (socket.create_connection(("127.0.0.1", served.port)) as plain,
          tls.wrap_socket(plain, server_hostname=certificates.COORDINATOR) as line):
        frames.receive(line)
        for asked in ({}, {"op": []}, {"op": "get", "sha256": "../../journal.jsonl", "start": 0}, {"op": "offer"},
                      {"op": "get", "sha256": "0" * 64, "start": -1}, {"op": "entries", "after": 0, "wait": "x"},
                      {"op": "entries", "after": -1, "wait": 0}, {"op": "offer", "offer": {"island": 0}},
                      {"op": "put", "sha256": "0" * 64, "start": 2**40}):
            frames.send(line, asked)
            assert "error" in frames.receive(line)[0], asked
    assert island(0).entries(0, 0) == [] and not list((served.folder / "contents").iterdir())


@pytest.mark.slow
def test_silent_strangers_make_room_for_islands(island, served, monkeypatch):
    monkeypatch.setattr(meeting_server, "_MOST", 3)
    strangers = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(5)]
    assert [line.recv(1) for line in strangers[:2]] == [b"", b""], "the oldest"
    assert island(0).entries(0, 0) == []
    for line in strangers:
        line.close()


def test_an_island_gives_signs_of_life_while_it_trains(island, served):
    seen = threading.Semaphore(0)
    served.log.alive = lambda number: seen.release()
    island(1, sign=0.05).entries(0, 0)
    assert all(seen.acquire(timeout=20) for _ in range(4))


def test_a_coordinator_that_stays_away_is_an_oserror(island, served, monkeypatch, capsys):
    """The island also says how to start it, again and again."""
    looks = itertools.count()  # a hundredth of a second each: its patience is some attempts, however long they take
    monkeypatch.setattr(tcp_meeting, "time", SimpleNamespace(monotonic=lambda: next(looks) / 100))
    monkeypatch.setattr(tcp_meeting, "TELL_S", 0.0)
    meeting = island(0, patience=0.3)
    assert meeting.entries(0, 0) == []
    served.stop()
    with pytest.raises(OSError, match="the coordinator of the islands is out of reach"):
        while True:
            meeting.entries(0, 0)
    assert capsys.readouterr().err.count(f"if it does not run, start it with jaxtrain diloco serve --workdir=DIR "
                                         f"--address=0.0.0.0:{served.port} --keys=DIR --islands=1\n") > 1


def test_a_coordinator_that_stays_away_does_not_hold_an_island_that_is_to_stop(served, keys, monkeypatch):
    monkeypatch.setattr(waiting_meeting, "PATIENCE_S", 0.0)
    served.stop()
    meeting = open_meeting(DilocoConfig(count=2, meeting=f"tcp://127.0.0.1:{served.port}", keys=str(keys)))
    for call in (lambda: meeting.offer(*offered(0, 0, b"")), lambda: meeting.entries(0, 0),
                 lambda: meeting.content("0"), lambda: meeting.put_snapshot(1, b""), meeting.snapshot):
        with pytest.raises(Unanswered):
            call()
    meeting._meeting.close()


def test_a_line_that_another_thread_takes_is_replaced(island):
    class Taken(list):
        def __bool__(self):
            return True  # as it was before the other thread came

    one = island(0)
    one._unused = Taken()
    assert list(one.entries(0, 0)) == []


def test_a_silent_line_is_left_for_another(island, served):
    with CuttingProxy(served.port) as proxy:
        meeting = island(0, proxy.port, silence=0.3)
        proxy.silent = [True, False]  # the first connection gets no answers
        assert meeting.entries(0, 0) == [] and proxy.connections >= 2  # of slow answers more are given up


def test_one_coordinator_at_a_time_and_a_folder_that_can_be_written(served, tmp_path):
    with pytest.raises(UserError, match="another coordinator is using"):
        OuterLog(served.folder, Policy())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used"):
        OuterLog(tmp_path / "file", Policy())
    with pytest.raises(UserError, match=r"--address: .* cannot be opened"):
        MeetingServer(served.log, f"127.0.0.1:{served.port}", ssl.create_default_context())
