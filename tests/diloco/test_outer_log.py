"""The log on disk: what was told is there after any kill, and what cannot be kept is not decided."""

import contextlib
import errno
import hashlib
import itertools
import os

import pytest

from jaxtrain.diloco.coordinator import Policy
from jaxtrain.diloco.meeting import Offer, Trimmed
from jaxtrain.diloco.outer_log import OuterLog
from jaxtrain.errors import UserError


def offered(island, base, content=b"content"):
    return Offer(island, base, 0, 1.0, hashlib.sha256(content).hexdigest()), content


@pytest.fixture
def journal(tmp_path):
    """The journal of a log with two entries and an open offer."""
    log = OuterLog(tmp_path, Policy(islands=2))
    for base in range(2):
        for island in range(2):
            log.offer(*offered(island, base))
    log.offer(*offered(0, 2))
    log.close()
    return tmp_path / "journal.jsonl"


def positions(folder):
    log = OuterLog(folder, Policy(islands=2))
    try:
        return log.position, log.taken(offered(0, 2)[0]) is not None
    finally:
        log.close()


def test_a_journal_that_was_cut_anywhere_has_what_stood_before(journal):
    content = journal.read_bytes()
    ends = [at + 1 for at, byte in enumerate(content) if byte == ord("\n")]
    assert len(ends) == 7 and positions(journal.parent) == (2, True)
    for cut in sorted({*range(0, len(content), 97), *ends, *(end - 1 for end in ends), len(content) - 1}):
        journal.write_bytes(content[:cut])
        whole = sum(end <= cut for end in ends)
        assert positions(journal.parent) == ((whole >= 3) + (whole >= 6), whole == 7), cut
        assert journal.read_bytes() == content[: ([0, *ends])[whole]]


def test_a_line_that_was_changed_is_refused_and_not_guessed(journal):
    content = bytearray(journal.read_bytes())
    content[content.index(b'"base":0') + 7] = ord("1")
    journal.write_bytes(content)
    with pytest.raises(UserError, match=r"journal.jsonl: line 1 is damaged; restore the file"):
        positions(journal.parent)


def test_what_cannot_be_written_is_not_decided(tmp_path, monkeypatch):
    log = OuterLog(tmp_path, Policy(islands=1))
    log.offer(*offered(0, 0))

    def full(file, sync=os.fsync):
        if os.path.samestat(os.fstat(file), os.stat(tmp_path / "journal.jsonl")):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        log.offer(*offered(0, 1))
    assert log.position == 1 and "No space left on device" in log.failed
    with pytest.raises(OSError, match="cannot be written"):
        log.offer(*offered(0, 2))
    log.close()


def test_a_content_that_no_offer_needs_yet_stays_while_others_are_removed(tmp_path, monkeypatch):
    """A snapshot comes between the receipt of a content and the record of its offer."""
    log = OuterLog(tmp_path, Policy(islands=1))
    log.offer(*offered(0, 0))
    is_here = log._is_here

    def meanwhile(offer):
        found = is_here(offer)
        log.put_snapshot(1, b"state")
        return found

    monkeypatch.setattr(log, "_is_here", meanwhile)
    log.offer(*offered(0, 1, b"new"))
    assert log.content(offered(0, 1, b"new")[0].sha256) == b"new" and log.snapshot() == (1, b"state")
    log.close()


def test_an_island_whose_entry_is_trimmed_while_it_waits_is_told(tmp_path, monkeypatch):
    log = OuterLog(tmp_path, Policy(islands=1))

    def meanwhile(*_):
        for base in range(2):
            log.offer(*offered(0, base))
            log.put_snapshot(base + 1, b"state %d" % base)

    monkeypatch.setattr(log._changed, "wait_for", meanwhile)
    with pytest.raises(Trimmed):
        log.entries(0, 1)
    log.close()


def test_parts_that_overlap_or_leave_a_gap_make_a_whole(tmp_path):
    log = OuterLog(tmp_path, Policy(islands=1))
    offer, content = offered(0, 0, b"abcdefgh")
    here = [log.begin(0, offer.sha256, content[start:stop], start) for start, stop in ((0, 3), (5, 8), (1, 4), (2, 8))]
    assert here == [3, 3, 4, 8] and log.offer(offer) and log.content(offer.sha256) == content
    log.close()


class Killed(BaseException):
    """Raised where a process would be killed."""


def with_snapshots(folder):
    """A log with a snapshot after each second entry, and an open offer."""
    log = OuterLog(folder, Policy(islands=2))
    for base in range(6):
        for island in range(2):
            log.offer(*offered(island, base, b"%d %d" % (island, base)))
        if base % 2:
            yield log, base + 1
    log.offer(*offered(0, 6))
    yield log, 0


def test_a_kill_in_a_compaction_leaves_the_same_log(tmp_path, monkeypatch):
    """The kill is at each of its calls to the file system; records before a summary do nothing after it.

    What is not served any more goes when it starts again, if it did not before.
    """
    kills = 0
    for last in range(100):
        folder, calls = tmp_path / f"{last}", itertools.count()

        def may_crash(call, calls=calls, last=last):
            def done(*given, **keys):
                if next(calls) == last:
                    raise Killed
                return call(*given, **keys)
            return done

        for log, position in with_snapshots(folder):
            with contextlib.suppress(Killed), monkeypatch.context() as patch:
                for name in ("open", "fsync", "replace", "unlink") if position == 6 else ():
                    patch.setattr(os, name, may_crash(getattr(os, name)))
                log.put_snapshot(position, b"state %d" % position)
            if position == 6:
                kills += (killed := next(calls) > last)
                log.close()
                log = OuterLog(folder, Policy(islands=2))
                assert log.position == 6 and log._coordinator.begins == log.trimmed
                for base in range(6):
                    assert not log.wants(offered(1, base, b"again")[0])
                entries = log.entries(log.trimmed, 0)
                assert [entry.number for entry in entries] == list(range(log.trimmed + 1, 7))
                assert {path.name for path in (folder / "contents").iterdir()} == {
                    offer.sha256 for entry in entries for offer in entry.contributions}
                assert len(list((folder / "snapshots").iterdir())) == 2
                log.close()
                break
        if not killed:
            break
    assert kills > 15 and log.trimmed == 4


def test_a_journal_begins_with_a_summary_of_what_is_not_served(tmp_path, capsys):
    sizes = []
    for log, position in with_snapshots(tmp_path):
        if position:
            log.put_snapshot(position, b"state")
        sizes.append((tmp_path / "journal.jsonl").read_bytes().count(b"\n"))
    log.close()
    assert sizes == [6, 7, 7, 8], "of two entries and their offers 3 lines each"
    again = OuterLog(tmp_path, Policy(islands=2))
    assert (again.position, again.trimmed) == (6, 4) and again.taken(offered(0, 6)[0])
    assert again.entries(4, 0) == log.entries(4, 0)
    with pytest.raises(Trimmed):
        again.entries(3, 0)
    again.close()
    for path in (tmp_path / "snapshots").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"^--workdir: .* lacks the snapshot of entry 4; restore it, or begin another"):
        OuterLog(tmp_path, Policy(islands=2))
