"""Traces have the rates that they are drawn from, and tell of a real run's failures when they happened."""

import itertools
import statistics

import pytest

from jaxtrain.observe.events import record
from jaxtrain.simulation.failure_trace import DAY, Failure, drawn, recorded
from jaxtrain.simulation.reported_rates import LLAMA3_CAUSES, RATES


@pytest.mark.parametrize("shape", [0.6, 1.0, 1.8])
def test_so_many_come_as_the_rate_says(shape):
    counts = [len(drawn({"machine": 0.01, "hang": 0.002, "process": 0.0}, 500, 30 * DAY, seed, shape))
              for seed in range(20)]
    assert statistics.mean(counts) == pytest.approx(0.012 * 500 * 30, rel=0.08)


def test_they_are_in_order_and_of_the_kinds_and_machines_that_there_are():
    trace = drawn({"machine": 0.05, "stop": 0.05}, 8, 30 * DAY, 1)
    assert trace == sorted(trace) == drawn({"machine": 0.05, "stop": 0.05}, 8, 30 * DAY, 1)
    assert {one.kind for one in trace} == {"machine", "stop"} and {one.slot for one in trace} <= set(range(8))
    assert all(0 <= one.at < 30 * DAY for one in trace)


def test_a_shape_below_one_comes_in_clusters():
    """The times between two failures of one machine vary more than exponential ones."""
    def spread(shape):
        at = [one.at for one in drawn({"machine": 1.0}, 1, 4000 * DAY, 0, shape)]
        gaps = [b - a for a, b in itertools.pairwise(at)]
        return statistics.stdev(gaps) / statistics.mean(gaps)

    assert spread(0.5) > 1.5 > spread(1.0) > 0.9 > spread(3.0)


def test_published_rates():
    assert sum(sum(causes.values()) for causes in LLAMA3_CAUSES.values()) == 419
    assert sum(RATES["llama3"].per_day.values()) * 2048 * 54 == pytest.approx(419)
    assert RATES["rsc1"].thousand_node_days == pytest.approx(6.5)
    # Kokolis et al. derive 1.8 hours between failures of a job on 16,384 GPUs and 0.23 on 131,072 from it.
    assert 24 / (2048 * sum(RATES["rsc1"].per_day.values())) == pytest.approx(1.8, abs=0.05)
    assert 24 / (16384 * sum(RATES["rsc1"].per_day.values())) == pytest.approx(0.23, abs=0.006)


def test_events_tell_when_a_run_failed(tmp_path):
    supervisor = {"process": "supervisor"}
    record(tmp_path, "attempt", time=100.0, **supervisor)
    record(tmp_path, "restart", time=130.5, why="process 1 was killed by SIGKILL", **supervisor)
    record(tmp_path, "attempt", time=131.0, **supervisor)
    record(tmp_path, "recovered", time=150.0, seconds=20.0, **supervisor)
    record(tmp_path, "restart", time=170.0, why="process 0 gave no sign of life", **supervisor)
    record(tmp_path, "restart", time=190.0, why="process 0 was killed by SIGKILL", process=1)  # of somebody else
    assert recorded(tmp_path) == [Failure(30.0, "process", 1), Failure(70.0, "hang", 0)]
