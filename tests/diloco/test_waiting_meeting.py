"""Calls that come back unanswered, so that an island can stop meanwhile."""

import threading

import pytest

from jaxtrain.diloco import waiting_meeting
from jaxtrain.diloco.meeting import Trimmed, Unanswered
from jaxtrain.diloco.meeting_places import SharedMeeting
from jaxtrain.diloco.waiting_meeting import WaitingMeeting


class Slow:
    """A meeting that answers when it is told to."""

    def __init__(self):
        self.answers, self.calls = threading.Event(), []

    def entries(self, after, wait):
        self.calls.append(after)
        self.answers.wait(600)
        if after:
            raise Trimmed("it was there once")
        return []

    def snapshot(self):
        return 3, b"state"


@pytest.fixture(params=[lambda meeting: meeting, SharedMeeting], ids=["one process", "several"])
def both(request, monkeypatch):
    monkeypatch.setattr(waiting_meeting, "PATIENCE_S", 0.0)
    return (slow := Slow()), request.param(WaitingMeeting(slow))


def test_a_call_goes_on_while_it_comes_back_unanswered(both):
    slow, meeting = both
    for after in (0, 7):
        slow.answers.clear()
        for _ in range(3):
            with pytest.raises(Unanswered):
                meeting.entries(after, 0)
        slow.answers.set()
        while True:
            try:
                assert meeting.entries(after, 0) == []
                break
            except Unanswered:
                continue
            except Trimmed as error:
                assert after and str(error) == "it was there once"
                break
    assert slow.calls == [0, 7], "each was made once"


def test_an_answer_comes_through(both, monkeypatch):
    monkeypatch.setattr(waiting_meeting, "PATIENCE_S", 60.0)
    assert both[1].snapshot() == (3, b"state")
