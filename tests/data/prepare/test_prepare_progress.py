"""What is said while the work goes on: right figures, seldom enough, and nothing beside an error."""

import io

import pytest

from jaxtrain.data.formats.inputs import Piece
from jaxtrain.data.prepare import prepare_progress
from jaxtrain.data.prepare.prepare_progress import Line, Progress

TASKS = [(Piece("a", "a", "text", 0, size, size),) for size in (10_000_000, 20_000_000, 30_000_000, 40_000_000)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(prepare_progress.time, "monotonic", lambda: now[0])
    return now


def test_a_resumed_run_counts_its_own_rate(clock):
    said = []
    told = Progress("tokens", TASKS, range(4), [1, 2, 3], said.append)
    clock[0] += 10
    told.add(2)
    clock[0] += 10
    told.add(1)
    told.add(3)
    assert said == ["tokens: 1 of 4 tasks", "tokens: 2 of 4 tasks, 40.0%, 3.00 MB/s, 0:00:20 left",
                    "tokens: 3 of 4 tasks, 60.0%, 2.50 MB/s, 0:00:16 left",
                    "tokens: 4 of 4 tasks, 100.0%, 4.50 MB/s, 0:00:00 left"]


def test_a_part_counts_its_own_tasks_and_nothing_to_do_says_nothing(clock):
    said = []
    told = Progress("tokens", TASKS, [1, 3], [1], said.append)
    clock[0] += 1
    told.add(1)
    assert said[1] == "tokens: 2 of 2 tasks, 100.0%, 20.00 MB/s, 0:00:00 left"
    Progress("tokens", TASKS, [1, 3], [], lambda line: pytest.fail(line))


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
