"""The slots that work."""

from types import SimpleNamespace

import pytest

from jaxtrain.distributed import exit_codes
from jaxtrain.launch.supervisor import supervisor
from jaxtrain.launch.supervisor.slot_pool import Order, SlotPool
from jaxtrain.observe.events import events
from tests.odd_files import ODD, in_time


@pytest.fixture
def clock():
    class Clock:
        now = 1000.0

        def __call__(self):
            return self.now

    return Clock()


def staff(clock, minimum=2, fits=lambda count: True, **keys):
    return SlotPool(4, minimum, fits, clock=clock, **keys)


def test_all_of_them(clock):
    assert staff(clock).wanted() == [0, 1, 2, 3]


def test_two_deaths_in_a_row_and_it_rests(clock):
    s = staff(clock)
    assert not s.died(1) and s.wanted() == [0, 1, 2, 3]
    assert s.died(1) and s.wanted() == [0, 2, 3]
    clock.now += 599
    assert s.wanted() == [0, 2, 3]
    clock.now += 1
    assert s.wanted() == [0, 1, 2, 3]
    assert s.died(1) and s.wanted() == [0, 2, 3]  # it has had its second chance


def test_deaths_far_apart_or_of_others_are_no_row(clock):
    s = staff(clock)
    s.died(1)
    clock.now += 600
    assert not s.died(1)
    assert not s.died(2) and not s.died(1)


def test_never_elastic_when_all_are_needed(clock):
    s = staff(clock, minimum=4)
    assert not any(s.died(1) for _ in range(9)) and s.wanted() == [0, 1, 2, 3]


def test_the_most_that_a_mesh_fits(clock):
    s = staff(clock, fits=lambda count: count == 2, lost_after=1)
    s.died(0)
    assert s.wanted() == [1, 2]


def test_below_the_minimum_all_are_taken_back(clock):
    s = staff(clock, minimum=3, lost_after=1)
    s.died(0)
    s.died(1)
    assert s.wanted() == [0, 1, 2, 3]
    s = staff(clock, lost_after=1, fits=lambda count: False)
    s.died(3)
    assert s.wanted() == [0, 1, 2, 3]


def test_orders(clock):
    s = staff(clock, lost_after=1)
    s.ask(3)
    assert s.wanted() == [0, 1, 2]
    s.died(1)
    assert s.wanted() == [0, 2, 3]
    s.ask(2)
    assert s.wanted() == [0, 2]
    s.ask(4)  # with it
    assert s.wanted() == [0, 1, 2, 3]


def test_an_order_is_read_once(tmp_path):
    path, complaints = tmp_path / "processes", []
    path.write_text("2")
    order = Order(path, 2, 4, complaints.append)
    assert order.new() is None  # it was there before us
    path.unlink()
    assert order.new() is None
    for text, expected in (("3\n", 3), ("", None), ("4", 4), ("5", None), ("x", None), ("2", 2)):
        path.write_text(text)
        assert order.new() == expected and order.new() is None
    assert len(complaints) == 2 and "'5' is not a number from 2 to 4" in complaints[0]


@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_what_is_no_file_is_no_order(tmp_path, make):
    make(tmp_path / "processes")
    assert in_time(lambda: Order(tmp_path / "processes", 2, 4, print).new()) is None


@pytest.mark.parametrize("resized", ["", "2 instead of 1 processes"])
def test_leaving_processes_out_does_not_go_on_for_ever(tmp_path, monkeypatch, resized):
    """A run that fails on every slot completes no step, whichever of them are left out, taken back or ordered."""
    settings = supervisor.Settings(processes=2, min_processes=1, max_restarts=5)
    run = supervisor.Supervisor(settings, ["--config=none.py", f"--workdir={tmp_path}"], tmp_path)
    attempts = []

    def attempt(down):
        assert len(attempts) < 100
        attempts.append(slots := run.staff.wanted())
        child = SimpleNamespace(slot=slots[0], rank=0, code=1)
        return SimpleNamespace(done=False, culprit=child, lost=child, resized=resized, why="it crashed",
                               told="it crashed", since=0.0, verdict="", logs="")

    monkeypatch.setattr(run, "_attempt", attempt)
    monkeypatch.setattr(run, "_fits", lambda processes: True)
    monkeypatch.setattr(run, "_sleep", lambda seconds: True)
    run.staff.fits = run._fits
    assert run.run() == exit_codes.STOPPED
    assert len(attempts) == 5 + 2 * 2 + 1 and ([0] in attempts or [1] in attempts or resized)
    assert [event["attempts"] for event in events(tmp_path) if event["kind"] == "gave_up"] == [len(attempts)]
