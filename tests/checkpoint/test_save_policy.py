"""Saves come as often as they pay, and in all processes after the same steps."""

import jax
import numpy as np
import pytest

from jaxtrain.checkpoint import save_policy
from jaxtrain.checkpoint.save_policy import FIRST, MOST, PROCESS_MTBF, SPARE, SavePolicy, daly
from jaxtrain.config.load import make_config
from jaxtrain.config.schema import CheckpointConfig
from jaxtrain.errors import UserError
from jaxtrain.observe.events import events
from jaxtrain.observe.goodput import Incarnation
from jaxtrain.observe.ledger import Clock, Ledger


@pytest.mark.parametrize("share", [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5])
def test_no_interval_loses_much_less_among_simulated_failures(share):
    """A million failures; after each one the work since the last save is done again."""
    until_failure = np.random.default_rng(0).exponential(1.0, 1_000_000)

    def loss(work):
        saves = until_failure // (work + share)
        return 1 - saves.sum() * work / until_failure.sum()

    chosen = daly(share, 1.0)
    best = min(loss(work) for work in chosen * np.geomspace(0.2, 5, 60))
    assert loss(chosen) < 1.02 * best
    assert loss(3 * chosen) > 1.1 * best  # so that the bound means something


def test_of_saves_that_cost_more_than_failures_there_is_one_for_each():
    assert daly(5.0, 1.0) == 1.0


class Run:
    """A loop of steps of `pace` seconds on a made clock; a save blocks it, and slows the steps beside it."""

    def __init__(self, workdir, earlier=(), pace=1.0, **config):
        self.time, self.pace, self.step, self.written = 0.0, pace, 0, 0.0
        self.blocked, self.slower, self.takes, self.fails = 0.5, 1.2, 4.0, False
        clock = Clock()
        clock.monotonic = lambda: self.time
        self.ledger = Ledger(workdir, every=0, clock=clock)
        self.ledger._earlier = list(earlier)
        self.ledger.resumed(0)
        self.saves = SavePolicy(CheckpointConfig(**config), self.ledger, lambda: self.time < self.written,
                           lambda: self.fails, workdir=workdir, start=0)

    def until(self, step):
        """The steps after which it saves, and when."""
        saved = {}
        while self.step < step:
            self.step += 1
            self.ledger.dispatched(self.step)
            self.time += self.pace * (self.slower if self.time < self.written else 1)
            self.ledger.completed(self.step)
            if self.saves.due(self.step):
                saved[self.step] = self.time
                with self.saves.taking(self.step):
                    self.time = max(self.time, self.written) + self.blocked
                    self.written = self.time + self.takes
        return saved


def test_the_first_save_comes_after_a_minute_and_the_next_ones_when_the_first_has_told_its_price(tmp_path, capsys):
    run = Run(tmp_path, mtbf_hours=1)
    assert list(run.until(FIRST + 5)) == [FIRST]
    assert capsys.readouterr().err == ""
    saved = list(run.until(2000))
    cost = run.blocked + 4 * 0.2  # four steps were slower
    took = run.blocked + 4 * 1.2
    assert run.ledger._own.save_cost == pytest.approx(cost) and run.ledger._own.save_duration == pytest.approx(took)
    wanted = daly(cost, 3600.0)
    assert saved[0] - FIRST == pytest.approx(FIRST, abs=2)  # planned before the price was known
    assert saved[1] - saved[0] == pytest.approx(wanted, rel=0.05) and len(saved) == pytest.approx(2000 / wanted, abs=3)
    line, = capsys.readouterr().err.splitlines()  # said once: it has hardly changed since
    assert line == (f"checkpoint.every=auto: a save every 1:{wanted - 60:02.0f} min (about 94 steps); one costs "
                    "1.3 s and is on disk after 5.3 s, a failure is expected every 1:00:00 h")
    event, = events(tmp_path)
    assert event["kind"] == "checkpoint_interval" and event["seconds"] == pytest.approx(wanted)
    assert event["save_cost_s"] == pytest.approx(cost) and event["mtbf_s"] == 3600


def test_it_says_so_when_that_changes(tmp_path, capsys):
    run = Run(tmp_path, mtbf_hours=1)
    run.until(1000)
    run.blocked = 10.0
    run.until(3000)
    assert len(events(tmp_path)) == len(capsys.readouterr().err.splitlines()) > 1
    assert events(tmp_path)[-1]["seconds"] > 2 * events(tmp_path)[0]["seconds"]


def test_saves_that_fail_are_not_cheap_ones(tmp_path):
    run = Run(tmp_path, mtbf_hours=1)
    run.fails, run.blocked, run.takes = True, 0.0, 0.0
    assert np.diff(list(run.until(500))) == pytest.approx(FIRST, abs=2)  # nobody knows yet what one costs
    run.fails, run.blocked, run.takes = False, 0.5, 4.0
    gaps = np.diff(list(run.until(1500)))
    run.fails, run.blocked, run.takes = True, 0.0, 0.0
    assert np.diff(list(run.until(2500))) == pytest.approx(gaps[-1], abs=2)


def test_a_save_longer_than_the_first_interval_tells_its_price_to_the_next_one_which_waits_for_it(tmp_path):
    run = Run(tmp_path, mtbf_hours=1000)
    run.takes = 2.5 * FIRST
    saved = list(run.until(5000))
    first, second, third = saved[:3]
    assert first == FIRST and second == pytest.approx(2 * FIRST, abs=2)
    assert (third - second) * run.pace * run.slower > 0.8 * SPARE * run.takes


def test_a_run_of_less_than_a_minute_is_saved_at_its_end_only(tmp_path):
    assert Run(tmp_path, pace=0.01).until(5900) == {}


def test_a_first_step_that_takes_long_makes_no_early_save(tmp_path):
    run = Run(tmp_path, pace=40.0)
    run.until(1)
    run.pace = 0.1
    assert next(iter(run.until(1000).values())) == pytest.approx(FIRST, abs=1)


@pytest.mark.parametrize("pace", [pytest.param(0.001, marks=pytest.mark.slow), 0.37, 45.0, 300.0])
def test_any_pace(tmp_path, pace):
    saved = Run(tmp_path, pace=pace).until(int(max(20, 4000 / pace)))
    times = list(saved.values())
    assert times[0] == pytest.approx(max(FIRST, 2 * pace), rel=0.6)
    gaps = np.diff(times[1:])
    assert len(gaps) and (gaps < max(MOST + FIRST, 13 * pace)).all()


def test_bounds(tmp_path):
    run = Run(tmp_path)
    assert run.saves.mtbf == PROCESS_MTBF / jax.process_count()
    run.saves._costs.append(1.0)
    run.saves._durations.append(2.0)
    assert run.saves.seconds() == MOST  # Daly says 1:25 h
    run.saves._durations.append(1000.0)
    run.saves._durations.append(1000.0)
    assert run.saves.seconds() == SPARE * 1000.0  # never queues


def died(ended, cost=None):
    return Incarnation(began=0, tick=0, boot="", seconds={"step": 1800.0}, sign=1800.0, ended=ended, save_cost=cost,
                       save_duration=cost)


def test_failures_that_were_seen_count_more_and_more(tmp_path):
    assert Run(tmp_path, [died("stopped")] * 2, mtbf_hours=1).saves.mtbf == 3600 + 2 * 1800
    assert Run(tmp_path, [died("failed"), died("")], mtbf_hours=1).saves.mtbf == (3600 + 2 * 1800) / 3
    assert Run(tmp_path, [died("")] * 99, mtbf_hours=9999).saves.mtbf < 370_000


def test_what_a_save_costs_is_known_from_starts_before(tmp_path):
    run = Run(tmp_path, [died("", cost=2.0), died("")], mtbf_hours=1)
    wanted = daly(2.0, run.saves.mtbf)
    assert next(iter(run.until(1000))) == pytest.approx(wanted, abs=2) and wanted > FIRST


def test_so_many_steps_or_none(tmp_path):
    run = Run(tmp_path, every=7)
    assert list(run.until(30)) == [7, 14, 21, 28]
    assert run.ledger._own.save_duration == pytest.approx(run.blocked + 4 * 1.2)  # for a start that has auto
    assert list(Run(tmp_path, every=0).until(5000)) == []


def test_the_line_after_a_save_tells_how_long_it_held_up_the_loop(tmp_path):
    run = Run(tmp_path, every=5)
    run.until(4)
    assert run.saves.pop_fields() == {}
    run.until(5)
    assert run.saves.pop_fields() == {"checkpoint_blocked_s": 0.5} and run.saves.pop_fields() == {}


def test_process_0_decides_for_all(tmp_path, monkeypatch):
    class Service(dict):
        def key_value_set(self, key, value):
            assert key not in self
            self[key] = value

        def blocking_key_value_get(self, key, milliseconds):
            return self[key]

    service = Service()
    monkeypatch.setattr(jax._src.distributed.global_state, "client", service)
    found = []
    for process, pace in ((0, 1.0), (1, 3.0)):  # whatever the other one's clock says
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        monkeypatch.setattr(save_policy, "_PLANS", iter(range(10_000)))
        found.append(list(Run(tmp_path, pace=pace, mtbf_hours=1).until(1000)))
    assert found[0] == found[1] and len(found[0]) > 5
    assert len(service) < 10 + len(found[0])  # a word for each save, and few before the first


def test_config():
    assert make_config({}).checkpoint.every == "auto"
    for text, value in (("auto", "auto"), ("0", 0), ("1e3", 1000), ("12", 12)):
        found = make_config({}, {"checkpoint.every": text}).checkpoint.every
        assert found == value and type(found) is type(value)
    assert make_config({"checkpoint": {"every": 5}}).checkpoint.every == 5
    for wrong, line in (("often", "checkpoint.every: 'often' is no number of steps; give one, 0 or auto"),
                        ("-1", "checkpoint.every: -1 is no number of steps; give one, 0 or auto"),
                        ("2.5", "checkpoint.every: '2.5' is not a whole number; give a whole number"),
                        ("true", "checkpoint.every: 'True' is not a whole number; give a whole number")):
        with pytest.raises(UserError) as error:
            make_config({}, {"checkpoint.every": wrong})
        assert str(error.value) == line
    with pytest.raises(UserError, match=r"^checkpoint.mtbf_hours: -1.0 is negative"):
        make_config({}, {"checkpoint.mtbf_hours": "-1"})
