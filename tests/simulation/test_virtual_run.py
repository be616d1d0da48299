"""Simulated runs lose what the rules say, and the outside formulas for the simple case give the same."""

import dataclasses
import math
import statistics

import pytest

from jaxtrain.checkpoint.save_policy import daly, lost
from jaxtrain.config.schema import CheckpointConfig, ResilienceConfig
from jaxtrain.launch.supervisor.supervisor import Settings
from jaxtrain.observe.events import events
from jaxtrain.observe.goodput import account, incarnations
from jaxtrain.simulation.failure_trace import DAY, Failure, drawn
from jaxtrain.simulation.predictions import outcomes, traces, with_intervals
from jaxtrain.simulation.reported_rates import LLAMA3
from jaxtrain.simulation.run_durations import Durations
from jaxtrain.simulation.virtual_run import Setup, VirtualRun

# Starts, saves on disk and detection take no time: all that is lost is work, and what saves cost.
PLAIN = Durations(step=1.0, launch=0.0, init=0.0, restore=0.0, compile=0.0, save_blocked=2.0, save_written=0.0,
                  snapshot_blocked=0.0, snapshot_stored=0.0, others_end=0.0, silence=0.0, swap=0.0, ledger=1e-3)


def setup(slots=4, every=100, snapshots=0, durations=PLAIN, **more):
    return Setup(slots, durations, CheckpointConfig(every=every, local_checkpoint_every=snapshots), **more)


def test_without_failures_it_makes_its_steps():
    outcome = VirtualRun(setup(last_step=1000, durations=dataclasses.replace(PLAIN, finish=3.0)), []).run()
    (start,) = outcome.starts
    assert start.ended == "finished" and start.reached == (1000, 1000.0)
    assert outcome.account.seconds["checkpoint"] == pytest.approx(10 * 2.0 + 3.0)
    assert outcome.account.life == pytest.approx(1023.0)


def test_a_crash_costs_the_steps_since_the_last_save_and_a_start():
    d = dataclasses.replace(PLAIN, launch=7.0, init=5.0, restore=3.0, compile=2.0)
    life = VirtualRun(setup(durations=d, last_step=400), [Failure(14.0 + 250 + 4.0, "process", 1)]).run().account
    # The first start restores nothing; step 250 is complete at 14 + 250 + 2 saves of 2 s.
    assert life.failures == 1 and life.seconds["lost_work"] == pytest.approx(50.0, abs=0.01)
    assert life.seconds["step"] == pytest.approx(400.0, abs=0.01)
    assert life.seconds["restart_gap"] == pytest.approx(7.0, abs=0.01)
    assert (life.seconds["init"], life.seconds["restore"], life.seconds["compile"]) == pytest.approx((10, 3, 4))


def test_a_hang_is_noticed_after_the_watchdogs_limit():
    for factor, floor, limit in ((20.0, 120.0, 120.0), (200.0, 120.0, 200.0)):
        resilience = ResilienceConfig(hang_factor=factor, hang_floor=floor)
        life = VirtualRun(setup(last_step=400, resilience=resilience), [Failure(254.0, "hang")]).run().account
        assert life.seconds["lost_work"] == pytest.approx(50.0 + limit, abs=0.1)


def test_a_stop_saves_and_loses_nothing():
    life = VirtualRun(setup(last_step=400, durations=dataclasses.replace(PLAIN, maintenance=60.0)),
                      [Failure(254.5, "stop")]).run().account
    assert life.failures == 0 and life.seconds["lost_work"] == 0.0
    assert life.seconds["step"] == pytest.approx(400) and life.seconds["idle"] == pytest.approx(60.0)


@pytest.mark.parametrize("kinds, resumed", [
    (["process"], 250), (["machine"], 250), (["storage"], 0),
    # The peer of machine 1 is machine 2: with both lost, a part of the state in memory is gone.
    (["machine 1", "machine 2"], 200), (["machine 1", "machine 3"], 250)])
def test_what_survives_of_each_tier(kinds, resumed):
    failures = [Failure(254.5 + i, kind.partition(" ")[0], int(kind.partition(" ")[2] or 1))
                for i, kind in enumerate(kinds)]  # the second one strikes before the run has started again
    durations = dataclasses.replace(PLAIN, silence=5.0)
    outcome = VirtualRun(setup(snapshots=50, last_step=300, spares=4, durations=durations), failures).run()
    assert outcome.starts[-1].resumed == resumed


def test_a_mirror_survives_the_file_system():
    plain = setup(last_step=300, durations=dataclasses.replace(PLAIN, mirrored=60.0))
    mirrored = dataclasses.replace(plain, checkpoint=CheckpointConfig(every=100, mirror="s3://there"))
    for at, resumed in ((254.0, 100), (270.0, 200)):  # step 200 is saved at 204 s
        for one, first in ((plain, 0), (mirrored, resumed)):
            assert VirtualRun(one, [Failure(at, "storage")]).run().starts[-1].resumed == first


def test_a_machine_that_nobody_replaces_makes_the_supervisor_give_up(tmp_path):
    durations = dataclasses.replace(PLAIN, repair=10 * DAY, join=300.0, person=1800.0)
    failures = [Failure(254.0, "machine", 2)]
    outcome = VirtualRun(setup(durations=durations, until=DAY), failures, workdir=tmp_path).run()
    told = [event["kind"] for event in events(tmp_path)]
    first = told[:told.index("gave_up")]
    # After the attempt with new steps, so many restarts without one, and then the one that is one too many.
    assert first.count("attempt") == 1 + Settings().max_restarts + 1
    assert outcome.gave_up > 10 and len(outcome.starts) == 1
    spared = VirtualRun(setup(durations=durations, until=DAY, spares=1), failures).run()
    assert spared.gave_up == 0 and spared.account.ettr > 0.99 > outcome.account.ettr


def test_an_elastic_run_continues_without_a_machine_and_takes_it_back():
    durations = dataclasses.replace(PLAIN, repair=3000.0, init=1.0)
    found = VirtualRun(setup(durations=durations, least=2, fits=lambda count: count in (2, 4), until=DAY / 4,
                             rules=Settings(lost_after=1)), [Failure(254.0, "machine", 2)]).run()
    assert found.gave_up == 0
    paces = [one.reached[1] / max(1, one.reached[0] - (one.resumed or 0)) for one in found.starts]
    assert max(paces) == pytest.approx(2.0, rel=0.01), "half of the machines take twice as long for the same batch"
    assert paces[-1] == pytest.approx(1.0, rel=0.01) and "stopped" in {one.ended for one in found.starts}


@pytest.mark.parametrize("seed", range(3))
def test_every_second_is_booked_once(seed, tmp_path):
    """Whatever fails; and the files are what the simulation counted."""
    rates = {kind: 1.0 for kind in ("process", "machine", "hang", "stop", "bug")}
    one = Setup(5, Durations(), CheckpointConfig(every=40, local_checkpoint_every=7), spares=seed % 3, until=DAY,
                least=2 * (seed % 2), rules=Settings(max_restarts=seed))
    outcome = VirtualRun(one, drawn(rates, 5, DAY, seed), seed, tmp_path).run()
    assert len(outcome.starts) > 5
    whole = sum(outcome.account.seconds.values())
    first, last = outcome.starts[0].began, outcome.starts[-1].sign
    assert whole == pytest.approx(last - first, abs=1e-3)
    assert account(incarnations(tmp_path)).seconds == pytest.approx(outcome.account.seconds)
    assert all(seconds >= -1e-9 for start in outcome.starts for seconds in start.seconds.values())


def share_lost(every: int, seed: int = 0) -> float:
    """The share of the time that saves and failures cost, simulated."""
    one = setup(slots=1, every=every, until=20 * DAY)
    found = outcomes(one, traces({"process": 24.0}, one, 4, seed))  # one failure an hour
    return statistics.fmean(1 - each.account.goodput for each in found)


def test_what_saves_and_failures_cost_is_what_dalys_formula_says():
    for work in (30, 120, 480):
        assert share_lost(work) == pytest.approx(lost(float(work), 2.0, 3600.0), rel=0.06)


def test_the_chosen_interval_is_youngs_and_dalys():
    """Young's sqrt(2 C M) in the case that it is derived for: nothing but saves and exponential failures."""
    one = setup(slots=1, until=10 * DAY)
    chosen = with_intervals(one, {"process": 24.0}, traces({"process": 24.0}, one, 6, 1), memory=False).checkpoint.every
    assert daly(2.0, 3600.0) == pytest.approx(math.sqrt(2 * 2.0 * 3600.0), rel=0.03)
    assert lost(chosen, 2.0, 3600.0) < 1.05 * lost(daly(2.0, 3600.0), 2.0, 3600.0)
    assert 60 <= chosen <= 240  # 118 by the formula; the optimum is flat


def test_expected_ettr_by_the_formula_of_kokolis_et_al():
    """E[ETTR] = (1 - N r (u + dt / 2)) / (1 + w / dt), arXiv:2410.21680, where losses are small."""
    d = dataclasses.replace(PLAIN, step=10.0, launch=100.0, init=50.0, compile=50.0)
    one = Setup(512, d, CheckpointConfig(every=60), until=60 * DAY, spares=512)
    per_day = {"process": 3.8e-3}
    found = outcomes(one, traces(per_day, one, 6, 3))
    simulated = statistics.fmean(each.account.goodput for each in found)
    formula = (1 - 512 * 3.8e-3 / DAY * (200 + 300)) / (1 + 2.0 / 600)
    assert simulated == pytest.approx(formula, abs=0.002)


def test_snapshots_lose_less_work_than_checkpoints():
    one = Setup(512, Durations(), until=10 * DAY, spares=8)
    failures = traces(LLAMA3.per_day, one, 2, 0)
    disk, memory = (outcomes(with_intervals(one, LLAMA3.per_day, failures, tier), failures) for tier in (False, True))
    work = [sum(each.account.seconds["lost_work"] for each in found) for found in (disk, memory)]
    assert work[1] < work[0]
