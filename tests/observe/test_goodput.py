"""Every second of a run's life is booked once, whatever ended its processes and whoever set the clock."""

import json
import random
import threading
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.commands import goodput as goodput_command
from jaxtrain.observe import Constants, MetricsWriter, goodput
from jaxtrain.observe.goodput import CATEGORIES, Incarnation, account, incarnations
from jaxtrain.observe.ledger import Ledger
from tests.odd_files import ODD, WRONG, in_time


class World:
    """Clocks that the test turns, and the truth about the seconds that passed."""

    def __init__(self):
        self.time, self.ahead, self.machine = 1000.0, 1.7e9, 0
        self.truth = []  # [category, seconds, step that a later start may do again]
        self.unwritten = 0  # where those begin that no file has yet

    def wall(self):
        return self.time + self.ahead

    def now(self):
        return self.time + 1e5 * self.machine

    def ledger(self, workdir, **more):
        return Ledger(workdir, every=0, now=self.now, wall=self.wall, **more)

    def spend(self, seconds, category, step=0):
        self.time += seconds
        self.truth.append([category, seconds, step])

    def resumed(self, step):
        for entry in self.truth:
            if entry[0] == "step" and entry[2] > step:
                entry[0] = "lost_work"

    def totals(self):
        found = Counter({category: 0.0 for category in CATEGORIES})
        for category, seconds, _ in self.truth:
            found[category] += seconds
        return found


def live(world, dice, workdir, saved):
    """One start of a run, up to an end at any moment; returns how it ended."""
    born = len(world.truth)
    ledger = world.ledger(workdir, stopped=(KeyboardInterrupt,))
    ends_after = dice.randrange(60)
    pace = dice.random()  # the steps of a start are equally long
    jumped = 0.0

    def alive(seconds, category, step=0):
        nonlocal ends_after, jumped
        ends_after -= 1
        if ends_after < 0:
            raise dice.choice([SystemError, OSError, KeyboardInterrupt])  # the first one stands for kill -9
        world.spend(seconds, category, step)
        if dice.random() < 0.05:  # somebody sets the wall clock, and back before the next start
            jumped += (jump := dice.choice([-3600.0, 86400.0]))
            world.ahead += jump
        if dice.random() < 0.4:
            ledger.write()
            came()

    def came():
        if ledger._file:
            world.unwritten = len(world.truth)

    def killed():
        for entry in world.truth[max(born, world.unwritten):]:
            entry[0] = "restart_gap"

    try:
        alive(dice.random(), "init")
        ledger.open(100)
        world.unwritten = len(world.truth)
        with ledger.book("restore"):
            alive(dice.random(), "restore")
        step = dice.choice(sorted(saved))
        ledger.resumed(step)
        world.resumed(step)
        came()
        saved -= {other for other in saved if other > step}
        with ledger.book("compile"):
            alive(dice.random(), "compile")
        with ledger.book("step"):
            while step < 100:
                with ledger.book("data_wait"):
                    alive(dice.random(), "data_wait")
                alive(pace / 3, "step", step + 1)
                ledger.dispatched(step + 1)
                with ledger.book("data_wait"):  # nobody waits: the devices are busy
                    alive(pace, "step", step + 1)
                ledger.completed(step + 1)
                step += 1
                if dice.random() < 0.3:
                    with ledger.book("checkpoint"):
                        alive(dice.random(), "checkpoint")
                    saved.add(step)
                if dice.random() < 0.1:
                    with ledger.book("eval"):
                        alive(dice.random(), "eval")
                if dice.random() < 0.05:  # a rollback without a restart
                    step = dice.choice(sorted(saved))
                    ledger.resumed(step)
                    world.resumed(step)
                    came()
                    saved -= {other for other in saved if other > step}
    except SystemError:
        killed()
        return ""
    except (OSError, KeyboardInterrupt) as error:
        ledger.__exit__(type(error), error, None)
        if ledger._file is None:  # it never had anything to do
            killed()
            return None
        world.unwritten = len(world.truth)
        return "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
    finally:
        world.ahead -= jumped
    ledger.__exit__(None, None, None)
    world.unwritten = len(world.truth)
    return "finished"


@pytest.mark.parametrize("seed", range(24))
def test_the_sum_is_the_time_that_passed_and_each_second_is_where_it_was_spent(tmp_path, seed):
    dice, world, saved, ended = random.Random(seed), World(), {0}, ""
    tmp_path.joinpath("ledger").mkdir()
    begun = False
    for _ in range(dice.randrange(2, 9)):
        gap = "idle" if ended in ("finished", "stopped") else "restart_gap"
        if begun:
            world.spend(100 * dice.random(), gap)
            world.machine += dice.random() < 0.3
        before, count = len(world.truth), len(incarnations(tmp_path))
        how = live(world, dice, tmp_path, saved)
        if len(incarnations(tmp_path)) > count:
            ended, begun = how, True
        elif not begun:  # it ended before it had a file, as if it had never been
            world.truth.clear()
            world.unwritten = 0
        else:  # ... and is part of the gap it stands in
            for entry in world.truth[before:]:
                entry[0] = gap
    found = incarnations(tmp_path)
    if not found:
        return
    del world.truth[world.unwritten:]  # told by nobody until somebody starts again
    life, passed = account(found), world.totals()
    for category in CATEGORIES:
        assert life.seconds[category] == pytest.approx(passed[category], abs=1e-4), category
    assert sum(life.seconds.values()) == pytest.approx(sum(passed.values()), abs=1e-4)
    assert life.failures == sum(one.ended not in ("finished", "stopped") for one in found[:-1])
    assert 0 <= life.goodput <= life.ettr <= 1


# ------------------------------------------------------------------------------------------------- one thing at a time


def trained(world, workdir, start=0, steps=10, last=10):
    """A ledger with steps of one second behind it, the last of them saved, and no end."""
    ledger = world.ledger(workdir)
    ledger.open(last)
    ledger.resumed(start)
    for step in range(start + 1, start + steps + 1):
        ledger.dispatched(step)
        world.time += 1
        ledger.completed(step)
    ledger.write()
    return ledger


def test_steps_done_again_are_lost_and_a_kill_costs_what_no_file_has(tmp_path):
    world = World()
    trained(world, tmp_path)
    world.time += 5  # alive, but killed before the next file: nobody knows
    world.time += 7
    trained(world, tmp_path, start=4, steps=6)
    life = account(incarnations(tmp_path))
    assert {category: seconds for category, seconds in life.seconds.items() if seconds} == {
        "step": 10.0, "lost_work": 6.0, "restart_gap": 12.0}
    assert life.goodput == 10 / 28 and life.failures == 1 and life.step == 10


def test_another_machine_has_another_clock_and_one_that_is_behind_makes_no_negative_gap(tmp_path):
    world = World()
    trained(world, tmp_path)
    world.machine += 1
    world.time += 30
    world.ahead -= 100
    trained(world, tmp_path, start=10)
    life = account(incarnations(tmp_path))
    assert life.seconds["restart_gap"] == 0 and sum(life.seconds.values()) == pytest.approx(20)


def test_a_hang_is_lost_with_the_steps_that_were_not_saved(tmp_path):
    world = World()
    ledger = trained(world, tmp_path)
    ledger.dispatched(11)
    world.time += 3600
    ledger.write()
    (found,) = incarnations(tmp_path)
    assert found.lost(10) == pytest.approx(3600) and found.lost(4) == pytest.approx(3606)
    assert found.lost(0) == pytest.approx(3610) and found.lost(11) == 0.0


def test_damage_is_passed_over_and_a_full_disk_costs_nothing(tmp_path, monkeypatch):
    world = World()
    ledger = trained(world, tmp_path, steps=3)
    before = (tmp_path / "ledger" / "0001.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        world.time += 1
        ledger.write()
    assert (tmp_path / "ledger" / "0001.json").read_bytes() == before
    trained(world, tmp_path, steps=2)
    for damage in (b"", b'{"began": ', b"[]", b"{}", b'{"began": 1, "seconds": []}'):
        (tmp_path / "ledger" / "0001.json").write_bytes(damage)
        assert [one.seconds["step"] for one in incarnations(tmp_path)] == [2.0]


def test_the_thread_writes_what_nobody_asked_it_to(tmp_path, capsys):
    with Ledger(tmp_path, every=0.01) as ledger:
        ledger.open(10)
        written = threading.Event()
        monkey = ledger.write

        def write(ended=""):
            monkey(ended)
            written.set()

        ledger.write = write
        assert written.wait(60)
    (found,) = incarnations(tmp_path)
    assert found.ended == "finished" and "where " in capsys.readouterr().err


def test_nothing_to_do_leaves_no_trace(tmp_path, capsys):
    with Ledger(tmp_path):
        pass
    assert not list(tmp_path.iterdir()) and capsys.readouterr().err == ""


def test_lines_tell_the_goodput_and_the_devices_say_what_a_step_is(tmp_path):
    world = World()
    ledger = world.ledger(tmp_path)
    ledger.resumed(0)
    with MetricsWriter(tmp_path, start_step=0, last_step=2, constants=Constants(1), ledger=ledger) as writer:
        world.time += 1
        writer.push(1, {"loss": jnp.float32(1)}, {"checkpoint_blocked_s": 0.5})
        writer.flush()
        world.time += 2
        with ledger.book("step"):
            world.time += 1
        writer.push(2, {"loss": jnp.float32(1)}, {})
        writer.flush()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["goodput"] for line in lines] == [0.0, 0.25] and ledger.reached == (2, 1.0)
    assert lines[0]["checkpoint_blocked_s"] == 0.5 and "checkpoint_blocked_s" not in lines[1]


def test_a_save_in_the_middle_of_a_line_is_told(tmp_path):
    with MetricsWriter(tmp_path, start_step=0, last_step=2, constants=Constants(1), log_every=2) as writer:
        writer.push(1, {"loss": jnp.float32(1)}, {"data_wait_s": 1.0, "checkpoint_blocked_s": 0.5})
        writer.push(2, {"loss": jnp.float32(1)}, {"data_wait_s": 2.0})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["checkpoint_blocked_s"] == 0.5 and line["data_wait_s"] == 1.5


def test_other_processes_keep_their_book_to_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    ledger = trained(World(), tmp_path)
    assert not list(tmp_path.iterdir()) and ledger.account().seconds["step"] == 10


def test_a_wait_that_the_devices_do_not_notice_is_no_wait():
    world = World()
    ledger = world.ledger("none")
    ledger.resumed(0)

    def batches():
        world.time += 1  # nothing in flight
        yield 1
        world.time += 2  # while step 1 runs ...
        ledger.completed(1)
        world.time += 4  # ... and after it
        yield 2

    for step in ledger.each("data_wait", batches()):
        ledger.dispatched(step)
    seconds = ledger.account().seconds
    assert seconds["data_wait"] == 5 and seconds["step"] == 2


def test_for_people(tmp_path, capsys):
    assert goodput_command.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"WORKDIR: {tmp_path} has no ledger; give the workdir of a run that has begun\n")
    one = Incarnation(began=1e9, resumed=0, reached=(600, 7200.0), last_step=1200, ended="stopped",
                      seconds={"init": 90.0, "compile": 120.0, "step": 7200.0})
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "0001.json").write_text(json.dumps(vars(one) | {"of a later version": 1}))
    assert goodput_command.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == """\
where 2:03:30 h went (1 start, 0 failed):
  step         2:00:00 h  97.2%  steps that count
  init          1:30 min   1.2%  starting up, before the first step
  compile       2:00 min   1.6%  compiling
goodput 97.2% (steps), ETTR 97.2% (and batches, saves, evaluations); step 600 of 1200, about 2:03:30 h to go
"""
    assert goodput_command.main([str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["seconds"]["compile"] == 120 and (said["step"], said["last_step"], said["starts"]) == (600, 1200, 1)
    assert said["goodput"] == pytest.approx(7200 / 7410) and said["ended"] == "stopped"


@pytest.mark.parametrize("make", [*ODD, *WRONG], ids=lambda make: make.__name__)
def test_whatever_lies_in_place_of_a_start(tmp_path, make):
    trained(World(), tmp_path)
    make(tmp_path / "ledger" / "0002.json")
    make(tmp_path / "ledger" / "3 copy.json")
    assert len(in_time(lambda: incarnations(tmp_path))) == 1
    trained(World(), tmp_path)  # the next start has a number of its own
    assert len(incarnations(tmp_path)) == 2 and (tmp_path / "ledger" / "0003.json").is_file()


@pytest.mark.parametrize("content", [
    '{"began": "x"}', '{"began": NaN}', '{"began": 1, "seconds": {"step": null}}', '{"began": 1, "reached": [1]}',
    '{"began": 1, "seconds": {"step": 1e999}}', '{"began": 1, "resumed": "3"}', '{"began": 1, "reached": [1, NaN]}',
    f'{{"began": 1{"0" * 400}}}', '{"began": 1, "ended": [1]}', '{"began": 1, "last_step": null}'])
def test_a_start_of_another_form_is_passed_over(tmp_path, capsys, content):
    trained(World(), tmp_path)
    (tmp_path / "ledger" / "0002.json").write_text(content)
    assert len(incarnations(tmp_path)) == 1 and goodput_command.main([str(tmp_path)]) == 0


def test_a_file_in_place_of_the_ledger_ends_no_run(tmp_path):
    (tmp_path / "ledger").write_text("")
    trained(World(), tmp_path)
    assert incarnations(tmp_path) == []


def test_two_that_start_at_once_have_files_of_their_own(tmp_path, monkeypatch):
    """Neither overwrites the other's seconds where locks do not work."""
    monkeypatch.setattr(type(tmp_path), "glob", lambda self, pattern: [])  # neither sees the other's file
    with Ledger(tmp_path, every=0) as one, Ledger(tmp_path, every=0) as two:
        one.open(10)
        two.open(20)
    monkeypatch.undo()
    assert sorted(start.last_step for start in incarnations(tmp_path)) == [10, 20]


def test_durations_are_read_at_a_glance():
    assert [*map(goodput.duration, (3.04, 125, 3 * 3600 + 65, 359_999, 360_000, 3692 * 3600))] == [
        "3.0 s", "2:05 min", "3:01:05 h", "99:59:59 h", "4.2 days", "153.8 days"]
