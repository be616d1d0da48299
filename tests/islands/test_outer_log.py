"""The log on disk: what was told is there after any kill, and what cannot be kept is not decided."""

import errno
import hashlib

import pytest

from jaxtrain.errors import UserError
from jaxtrain.islands.coordinator import Policy
from jaxtrain.islands.meeting import Offer
from jaxtrain.islands.outer_log import OuterLog


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

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(log._journal, "append", full)
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


def test_parts_that_overlap_or_leave_a_gap_make_a_whole(tmp_path):
    log = OuterLog(tmp_path, Policy(islands=1))
    offer, content = offered(0, 0, b"abcdefgh")
    here = [log.begin(0, offer.sha256, content[start:stop], start) for start, stop in ((0, 3), (5, 8), (1, 4), (2, 8))]
    assert here == [3, 3, 4, 8] and log.offer(offer) and log.content(offer.sha256) == content
    log.close()
