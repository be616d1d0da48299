"""Saves come every so many steps, and a run says once if another number of steps would lose much less time."""

import jax
import numpy as np
import pytest

from jaxtrain.checkpoint.save_policy import MOST, PROCESS_MTBF, SavePolicy, daly, lost
from jaxtrain.config.load import make_config
from jaxtrain.config.schema import CheckpointConfig
from jaxtrain.errors import UserError
from jaxtrain.observe.goodput import Incarnation
from jaxtrain.observe.ledger import Ledger


@pytest.mark.parametrize("share", [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5])
def test_no_interval_loses_much_less_among_simulated_failures(share):
    """Two hundred thousand failures; after each one the work since the last save is done again."""
    until_failure = np.random.default_rng(0).exponential(1.0, 200_000)

    def loss(work):
        saves = until_failure // (work + share)
        return 1 - saves.sum() * work / until_failure.sum()

    chosen = daly(share, 1.0)
    best = min(loss(work) for work in chosen * np.geomspace(0.2, 5, 30))
    assert loss(chosen) < 1.02 * best
    assert loss(3 * chosen) > 1.1 * best  # so that the bound means something
    for work in chosen * np.array([0.2, 1.0, 5.0]):
        assert lost(3600 * work, 3600 * share, 3600.0) == pytest.approx(loss(work), rel=0.02, abs=1e-3)


def test_of_saves_that_cost_more_than_failures_there_is_one_for_each():
    assert daly(5.0, 1.0) == 1.0
    assert lost(1e9, 1.0, 1.0) == 1.0 and lost(1.0, 0.0, 1e9) == pytest.approx(0, abs=1e-6)


class Run:
    """A loop of steps of `pace` seconds on a made clock; a save blocks it, and slows the steps beside it."""

    def __init__(self, workdir, earlier=(), pace=1.0, **config):
        self.time, self.pace, self.step, self.written = 0.0, pace, 0, 0.0
        self.blocked, self.slower, self.takes, self.fails = 0.5, 1.2, 4.0, False
        self.ledger = Ledger(workdir, every=0, now=lambda: self.time)
        self.ledger._earlier, self.ledger._own.last_step = list(earlier), 100_000
        self.ledger.resumed(0)
        self.saves = SavePolicy(CheckpointConfig(**config), self.ledger, lambda: self.time < self.written,
                                lambda: self.fails)

    def until(self, step):
        """Return the steps after which it saves."""
        saved = []
        while self.step < step:
            self.step += 1
            self.ledger.dispatched(self.step)
            self.time += self.pace * (self.slower if self.time < self.written else 1)
            self.ledger.completed(self.step)
            if self.saves.due(self.step):
                saved.append(self.step)
                with self.saves.taking():
                    self.time = max(self.time, self.written) + self.blocked
                    self.written = self.time + self.takes
        return saved


def advice(capsys):
    """Return the interval that was advised; None: there was no advice."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 1
    assert not lines or lines[0].startswith("hint: ")
    return int(lines[0].partition("; checkpoint.every=")[2].partition(" ")[0]) if lines else None


def test_saves_come_every_so_many_steps_or_never(tmp_path):
    assert Run(tmp_path, every=7).until(30) == [7, 14, 21, 28]
    assert Run(tmp_path, every=0).until(5000) == []


def test_saves_that_come_too_often_are_told_once_with_what_would_lose_less(tmp_path, capsys):
    run = Run(tmp_path, every=20, mtbf_hours=1)
    run.until(20)
    assert capsys.readouterr().err == ""
    run.until(2000)
    cost = run.blocked + 4 * 0.2  # four steps were slower
    best, mtbf = 96, 3624.5  # steps of one second; Daly says 96.2
    assert capsys.readouterr().err == (
        f"hint: saves ({cost:.1f} s each) and failures (one expected every 1:00:25 h) cost "
        f"{lost(20, cost, mtbf):.1%} of the time with checkpoint.every=20; checkpoint.every={best} would cost "
        f"{lost(best, cost, mtbf):.1%}\n")


def test_a_run_of_less_than_ten_minutes_gets_no_hint(tmp_path, capsys):
    run = Run(tmp_path, every=20, mtbf_hours=1)
    run.ledger._own.last_step = 500
    run.until(500)
    assert capsys.readouterr().err == ""


def test_saves_that_come_too_seldom_are_told_too(tmp_path, capsys):
    Run(tmp_path, every=900, mtbf_hours=1).until(1000)
    assert advice(capsys) == pytest.approx(daly(1.3, 4500.0), rel=0.05)


@pytest.mark.parametrize("config", [{"every": 60, "mtbf_hours": 1}, {"every": 500}, {"every": 5000}])
def test_there_is_no_advice_where_little_would_be_gained(tmp_path, capsys, config):
    Run(tmp_path, **config).until(6 * config["every"])
    assert advice(capsys) is None


def test_no_more_than_half_an_hour_of_work_is_advised(tmp_path, capsys):
    run = Run(tmp_path, every=20)
    assert run.saves._prior == PROCESS_MTBF / jax.process_count()
    run.until(100)
    assert advice(capsys) == MOST  # Daly says 1:37 h


def test_no_more_steps_than_the_run_has_are_advised(tmp_path, capsys):
    run = Run(tmp_path, every=20)
    run.ledger._own.last_step = 600
    run.until(100)
    assert advice(capsys) == 600


def test_saves_that_fail_are_not_cheap_ones(tmp_path, capsys):
    run = Run(tmp_path, every=900, mtbf_hours=1)
    run.fails, run.blocked, run.takes = True, 0.0, 0.0
    run.until(1000)
    assert advice(capsys) is None


def test_a_save_that_waits_for_the_previous_one_costs_that_wait(tmp_path, capsys):
    run = Run(tmp_path, every=20, mtbf_hours=1)
    run.takes = 100.0
    run.until(20)
    run.until(70)
    # The first save blocked for 0.5 s and slowed 20 steps; the second waited for it.
    assert advice(capsys) == pytest.approx(daly(0.5 + 20 * 0.2, 3600), rel=0.05)


def test_the_first_steps_of_a_run_and_its_waits(tmp_path, capsys):
    run = Run(tmp_path, every=5, mtbf_hours=1, pace=40.0)
    run.until(1)
    run.pace = 1.0
    run.until(9)
    assert advice(capsys) is None  # one save of five steps, of which the first was compiled
    with run.ledger.book("data_wait"):
        run.time += 5.0  # every second of the next five steps was waited for
    run.until(30)
    assert advice(capsys) == pytest.approx(daly(1.3, 3600) / 2, rel=0.15)


def died(ended):
    return Incarnation(began=0, seconds={"step": 1800.0}, ended=ended)


def test_failures_that_were_seen_count_more_and_more(tmp_path, capsys):
    for earlier, best in (([died("stopped")] * 2, daly(1.3, 3600 + 2 * 1800)),
                          ([died("failed"), died("")], daly(1.3, (3600 + 2 * 1800) / 3)),
                          ([died("")] * 99, daly(1.3, 181_800 / 100))):
        Run(tmp_path, earlier, every=10, mtbf_hours=1).until(40)
        assert advice(capsys) == pytest.approx(best, rel=0.05)


def test_the_line_after_a_save_tells_how_long_it_held_up_the_loop(tmp_path):
    run = Run(tmp_path, every=5)
    run.until(4)
    assert run.saves.pop_fields() == {}
    run.until(5)
    assert run.saves.pop_fields() == {"checkpoint_blocked_s": 0.5} and run.saves.pop_fields() == {}


def test_one_process_advises_for_all(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    Run(tmp_path, every=20, mtbf_hours=1).until(100)
    assert advice(capsys) is None


def test_config():
    assert make_config({}).checkpoint.every == 500
    for text, value in (("0", 0), ("1e3", 1000), ("12", 12)):
        found = make_config({}, {"checkpoint.every": text}).checkpoint.every
        assert found == value and type(found) is type(value)
    assert make_config({"checkpoint": {"every": 5}}).checkpoint.every == 5
    for wrong, line in (("auto", "checkpoint.every: 'auto' is not a whole number; give a whole number"),
                        ("-1", "checkpoint.every: -1 is negative; give 0 or more"),
                        ("2.5", "checkpoint.every: '2.5' is not a whole number; give a whole number"),
                        ("true", "checkpoint.every: 'True' is not a whole number; give a whole number")):
        with pytest.raises(UserError) as error:
            make_config({}, {"checkpoint.every": wrong})
        assert str(error.value) == line
    with pytest.raises(UserError, match=r"^checkpoint.mtbf_hours: -1.0 is negative"):
        make_config({}, {"checkpoint.mtbf_hours": "-1"})
