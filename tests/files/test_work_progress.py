"""The display of progress: right figures, seldom enough, and nothing beside an error."""

import io
import threading

import pytest

from jaxtrain.files import work_progress
from jaxtrain.files.work_progress import Line, Work


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(work_progress.time, "monotonic", lambda: now[0])
    return now


def test_in_a_log_a_line_comes_every_few_seconds_and_the_last_always(clock):
    stream = io.StringIO()
    with Line(stream, every=5) as say:
        for second in range(12):
            clock[0] += 1
            say(str(second))
    assert stream.getvalue().split() == ["4", "9", "11"]


def test_on_a_terminal_a_line_takes_the_place_of_the_one_before(monkeypatch):
    monkeypatch.setenv("COLUMNS", "8")
    stream = Terminal()
    with Line(stream) as say:
        say("one that is too long")
        say("two")
    assert stream.getvalue() == "\r\x1b[2Kone tha\r\x1b[2Ktwo\n"


@pytest.mark.parametrize(("stream", "left"), [(io.StringIO(), ""), (Terminal(), "\r\x1b[2Kone\r\x1b[2K")],
                         ids=["log", "terminal"])
def test_an_error_stands_alone(stream, left):
    with pytest.raises(ZeroDivisionError), Line(stream) as say:
        say("one")
        raise ZeroDivisionError
    assert stream.getvalue() == left


def test_short_work_says_nothing(clock):
    for stream in (io.StringIO(), Terminal()):
        with Work("reading", 10, stream=stream) as work:
            for _ in range(10):
                clock[0] += 0.1
                work.add()
        assert stream.getvalue() == ""


def test_long_work_tells_rate_and_time_left(clock):
    stream = Terminal()
    with Work("reading", 40e9, stream=stream) as work:
        for _ in range(4):
            clock[0] += 1.5
            work.add(3e9)
        shown = stream.getvalue().rpartition("\x1b[2K")[2]
        assert shown == "reading: 12.00 of 40.00 GB, 30%, 2,000 MB/s, 0:00:14 left"
        clock[0] += 0.01
        before = stream.getvalue()
        work.add(1)
        assert stream.getvalue() == before, "ten times a second at most"
    assert stream.getvalue() == f"{before}\r\x1b[2K", "nothing of it is left beside the result"
    work = Work("search", unit="layouts", stream=Terminal())
    work.total = 40
    work.add(10)
    assert work.text(5.0) == "search: 10 of 40 layouts, 25%, 2 per second, 0:00:15 left"
    assert Work("reading", 0).text(1.0) == "reading: 0.00 of 0.00 GB, 0%, 0 MB/s, unknown time left"


def test_in_a_log_long_work_says_little(clock):
    stream = io.StringIO()
    with Work("reading", 100, "files", stream=stream) as work, Work("x", 1, stream=stream, quiet=True) as quiet:
        for _ in range(100):
            clock[0] += 1
            work.add()
            quiet.add()
    assert stream.getvalue().splitlines() == [
        f"reading: {n} of 100 files, {n}%, 1 per second, 0:{(100 - n) // 60:02}:{(100 - n) % 60:02} left"
        for n in (30, 60, 90)]


def test_threads_count_together():
    work = Work("reading", 8000, "files", stream=io.StringIO())
    threads = [threading.Thread(target=lambda: [work.add() for _ in range(1000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert work.text(1.0).startswith("reading: 8,000 of 8,000 files, 100%")
