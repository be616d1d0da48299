"""Islands that meet in a folder or a store, beside others that come by another way, with one log."""

import hashlib
import math
import threading
import time
from dataclasses import replace

import pytest

from jaxtrain.config.sections.diloco_keys import DilocoConfig
from jaxtrain.diloco import folder_meeting
from jaxtrain.diloco.coordinator import Policy
from jaxtrain.diloco.folder_meeting import Bridge, FolderMeeting
from jaxtrain.diloco.meeting import Offer, Trimmed, Unanswered
from jaxtrain.diloco.meeting_places import open_meeting
from jaxtrain.diloco.outer_log import OuterLog
from jaxtrain.errors import UserError


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(folder_meeting, "PAUSE", (0.01, 0.05))


@pytest.fixture
def log(tmp_path):
    made = OuterLog(tmp_path / "log", Policy(islands=2, lease=1e9))
    yield made
    made.close()


def offered(island, base, content):
    return Offer(island, base, 0, 1.0, hashlib.sha256(content).hexdigest()), content


def meet(log, place):
    """One island in the store, one that reaches the log itself."""
    far, bridge = FolderMeeting(place, 0, sign=1e9, patience=5), Bridge(log, place)
    assert far.entries(0, 0) == [] and far.snapshot() is None
    for base in range(3):
        far.offer(*offered(0, base, b"far %d" % base))
        bridge.look()
        far.offer(*offered(0, base, b"another content of the same offer"))
        bridge.look()
        log.offer(*offered(1, base, b"near %d" % base))
        if base == 1:
            bridge = Bridge(log, place)  # it was restarted
        bridge.look()
        far.offer(replace(offered(0, base, b"")[0], sha256=log.entries(base, 0)[0].contributions[0].sha256, last=True),
                  b"far %d" % base)  # again with the same content, as of a run that has become longer
        bridge.look()
        (entry,) = far.entries(base, 0)
        assert entry == log.entries(base, 0)[0]
        assert [far.content(offer.sha256) for offer in entry.contributions] == [b"far %d" % base, b"near %d" % base]
        far.put_snapshot(base + 1, b"state %d" % base)
        bridge.look()
        assert log.snapshot() == far.snapshot() == (base + 1, b"state %d" % base)
    far.offer(*offered(0, 1, b"late"))
    bridge.look()
    names = {folder: bridge._store.names(folder) for folder in ("offers", "contents", "entries", "snapshots", "alive")}
    assert {folder: len(found) for folder, found in names.items()} == {
        "offers": 0, "contents": 2, "entries": 1, "snapshots": 2, "alive": 2}, names
    with pytest.raises(Trimmed):
        far.entries(1, 0)
    assert [entry.number for entry in far.entries(2, 0)] == [3]
    far.close()
    newcomer = FolderMeeting(place, 2, sign=1e9)
    assert newcomer.snapshot() == (3, b"state 2") and newcomer.entries(3, 0.02) == []
    newcomer.close()


def test_islands_meet_in_a_folder(log, tmp_path):
    meet(log, str(tmp_path / "meeting"))


def test_one_at_the_store_reads_an_entry_before_the_snapshot_that_another_one_made_of_it(log, tmp_path):
    far, bridge = FolderMeeting(str(tmp_path / "meeting"), 0, sign=1e9), Bridge(log, str(tmp_path / "meeting"))
    write = bridge._store.write

    def seen(name, content):
        write(name, content)
        far.entries(base, 0)  # it is not told that the entry is gone

    bridge._store.write = seen
    for base in range(2):
        for island in range(2):
            log.offer(*offered(island, base, b"%d %d" % (island, base)))
        log.put_snapshot(base + 1, b"state %d" % base)
        bridge.look()
        assert [entry.number for entry in far.entries(base, 0)] == [base + 1]
    far.close()


def test_islands_meet_in_any_store_of_fsspec(log, tmp_path):
    meet(log, f"memory://{tmp_path.name}/meeting")


@pytest.mark.slow
def test_islands_meet_in_object_storage_that_fails_now_and_then(log, bucket, network):
    network.shake(3, share=0.1, faults=("error", "busy", "reset"), methods=("GET", "PUT", "HEAD"))
    meet(log, f"{bucket}/meeting")
    assert len(network.faults) > 5


def test_a_store_has_one_log(log, tmp_path):
    """Islands would take the entries of an earlier one for those of the coordinator's."""
    place = tmp_path / "meeting"
    for island in range(2):
        log.offer(*offered(island, 0, b"%d" % island))
    Bridge(log, str(place)).look()
    before = sorted(path for path in place.rglob("*"))
    other = OuterLog(tmp_path / "other", Policy())
    with pytest.raises(UserError, match=f"--store: {place} has another log than {tmp_path / 'other'}; give a place of"):
        Bridge(other, str(place)).look()
    (place / "log").unlink()  # by an older version of the coordinator
    with pytest.raises(UserError, match="has another log than"):
        Bridge(other, str(place)).look()
    other.close()
    log.close()
    again = OuterLog(tmp_path / "log", Policy())
    assert again.name == log.name
    Bridge(again, str(place)).look()
    again.close()
    assert sorted(path for path in place.rglob("*")) == before


def test_an_entry_ends_the_wait(log, tmp_path):
    far, bridge, found = FolderMeeting(str(tmp_path / "meeting"), 0), Bridge(log, str(tmp_path / "meeting")), []
    far.offer(*offered(0, 0, b"far"))
    waiting = threading.Thread(target=lambda: found.extend(far.entries(0, 30)))
    waiting.start()
    log.offer(*offered(1, 0, b"near"))
    bridge.look()
    waiting.join(20)
    assert [entry.number for entry in found] == [1]
    far.close()


def test_what_is_damaged_is_left_and_said(log, tmp_path, capsys):
    place = tmp_path / "meeting"
    far, bridge = FolderMeeting(str(place), 0, sign=1e9), Bridge(log, str(place))
    offer, content = offered(0, 0, b"far")
    far.offer(offer, content)
    path = place / "contents" / f"{offer.sha256}-0-0"
    path.write_bytes(b"fat")
    (place / "offers" / "1-0.json").write_text('{"island": 0}')
    for _ in range(2):
        bridge.look()
    assert not log.taken(offer) and capsys.readouterr().err.count("does not match the hash") == 1
    path.write_bytes(content)
    bridge.look()
    assert log.taken(offer)
    far.close()


def test_an_offer_that_is_refused_ends_its_island_and_stops_no_other(log, tmp_path, capsys):
    place = str(tmp_path / "meeting")
    bridge, islands = Bridge(log, place), [FolderMeeting(place, island, sign=1e9, patience=1) for island in range(2)]
    (other, content), (mine, own) = (offered(island, 0, b"%d" % island) for island in range(2))
    islands[0].offer(replace(other, same="1" * 64), content)
    bridge.look()
    islands[1].offer(replace(mine, same="2" * 64), own)
    for _ in range(2):
        bridge.look()
    reason = "island 1: its outer parameters after entry 0, or its config, are not those of island 0; give all islands"
    assert capsys.readouterr().err.count(reason) == 1
    for _ in range(2):
        with pytest.raises(UserError, match=reason):
            islands[1].entries(0, 30)
    with pytest.raises(UserError, match=reason):
        islands[1].has_taken(mine)
    assert islands[0].entries(0, 0) == []
    islands[1].offer(replace(mine, same="1" * 64), own)  # after its user has mended it
    bridge.look()
    for island in islands:
        assert [entry.contributions for entry in island.entries(0, 0)] == [
            (replace(other, same="1" * 64), replace(mine, same="1" * 64))]
        island.close()


def test_signs_of_life_in_a_store_reach_the_coordinator(log, tmp_path):
    place = str(tmp_path / "meeting")
    far, bridge = FolderMeeting(place, 0, sign=1e9), Bridge(log, place)
    seen = []
    log.alive = seen.append
    for meeting in (far, None):
        meeting = meeting or FolderMeeting(place, 0, sign=1e9)  # it came back
        while bridge._store.read("alive/0") == bridge._alive.get("0"):
            time.sleep(0.01)
        bridge.look()
        bridge.look()
        meeting.close()
    assert seen == [0, 0], "each sign once"


@pytest.mark.parametrize("place", ["host:7000", "http://host:7000", __file__])
def test_an_address_without_tcp_or_a_file_is_not_taken_for_a_folder(place):
    with pytest.raises(UserError, match=f"diloco.meeting: {place} is not a coordinator, a folder or object storage"):
        open_meeting(DilocoConfig(count=2, meeting=place))


def test_what_goes_on_failing_is_told_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(folder_meeting, "PAUSE", (0.0, 0.0))
    errors = iter([OSError("no disk")] * 3)

    def read():
        for error in errors:
            raise error
        return 1

    meeting = FolderMeeting(f"{tmp_path}", 0)
    assert meeting._tried(read) == 1
    meeting.close()
    assert capsys.readouterr().err.count("no disk; trying again\n") == 1


def test_an_island_says_that_nobody_serves_its_place_and_how_to(log, tmp_path, capsys):
    """It says so at once, then at every third heartbeat without a new one of a coordinator."""
    place = str(tmp_path / "meeting")
    far, bridge = FolderMeeting(place, 1, 2, sign=1e9), Bridge(log, place)

    def said():
        """Return the messages about this place: a thread of another test may still print some."""
        return "".join(line for line in capsys.readouterr().err.splitlines() if line.startswith(place))

    while not (first := said()):
        time.sleep(0.01)
    assert first == (f"{place}: no coordinator serves it, so island 1 waits for the others at its next "
                     f"exchange; start one with jaxtrain diloco serve --workdir=DIR --store={place} --islands=2")
    told = []
    for served in (False, False, False, True, False, False, False, True):
        if served:
            bridge._signed = -math.inf
            bridge.look()
        far._look_for_coordinator()
        told.append(said()[len(place) + 2:][:14])
        assert far.entries(0, 0.0) == []
        if told[-1].startswith("no"):
            with pytest.raises(Unanswered):  # so that a run that is told to stop need not wait here
                far.entries(0, 0.01)
    assert far.entries(0, 0.01) == []
    far.close()
    assert told == ["", "", "no coordinator", "a coordinator ", "", "", "no coordinator", "a coordinator "]
