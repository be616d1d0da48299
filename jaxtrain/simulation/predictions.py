"""Predictions: the goodput of a run on so many machines, and the intervals, tiers and spares with which it is highest.

Each choice is the one with the highest mean over the same drawn failures. Daly's formula says where to look.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxtrain.checkpoint.save_policy import MOST, daly
from jaxtrain.config.schema import CheckpointConfig
from jaxtrain.observe.goodput import CATEGORIES
from jaxtrain.simulation.failure_trace import DAY, Failure, drawn
from jaxtrain.simulation.virtual_run import Outcome, Setup, VirtualRun

_AROUND = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8)  # times what Daly's formula gives
_RARER = (1, 4, 16)  # how many times as far apart checkpoints are, where snapshots come between them
SEARCH, ENOUGH = 4, 50  # drawn traces on which choices are compared, and failures in each


@dataclass(frozen=True)
class Prediction:
    """The result of simulated runs of one setup: the 10th, 50th and 90th percentile, and means."""

    setup: Setup
    low: float
    middle: float
    high: float
    failures: float  # of a run
    gave_up: float
    shares: Mapping[str, float]  # of the time, by category of the ledger
    effective: float  # the productive share of all time, planned stops included

    @property
    def tier(self) -> str:
        """The tiers in words."""
        return "snapshots" if self.setup.checkpoint.local_checkpoint_every else "checkpoints"


def mtbf(per_day: Mapping[str, float], slots: int) -> float:
    """Return the mean seconds between two failures of a run on so many machines."""
    rate = sum(rate for kind, rate in per_day.items() if kind != "stop") * slots
    return DAY / rate if rate else float("inf")


def traces(per_day: Mapping[str, float], setup: Setup, runs: int, seed: int, shape: float = 1.0
           ) -> list[list[Failure]]:
    """Return the failures of so many runs."""
    return [drawn(per_day, setup.slots, setup.until, seed + run, shape) for run in range(runs)]


def outcomes(setup: Setup, failures: Sequence[Sequence[Failure]], seed: int = 0) -> list[Outcome]:
    """Return what each of these traces does to a run."""
    return [VirtualRun(setup, trace, seed + run).run() for run, trace in enumerate(failures)]


def predict(setup: Setup, failures: Sequence[Sequence[Failure]], seed: int = 0) -> Prediction:
    """Return what comes of a setup."""
    found = outcomes(setup, failures, seed)
    accounts = [one.account for one in found]
    ettr = [each.ettr for each in accounts]
    low, middle, high = percentiles(ettr)
    productive = statistics.fmean(
        each.ettr * each.life / one.seconds for each, one in zip(accounts, found, strict=True))
    shares = {name: statistics.fmean(each.seconds[name] / max(each.life, 1e-9) for each in accounts)
              for name in CATEGORIES}
    return Prediction(setup, low, middle, high, statistics.fmean(one.failures for one in found),
                      statistics.fmean(one.gave_up for one in found), shares, productive)


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the 10th, 50th and 90th percentile; of few values the lowest, the median and the highest."""
    ordered = sorted(values)
    if len(ordered) < 10:
        return ordered[0], statistics.median(ordered), ordered[-1]
    tenths = statistics.quantiles(ordered, n=10, method="inclusive")
    return tenths[0], statistics.median(ordered), tenths[-1]


def with_intervals(setup: Setup, per_day: Mapping[str, float], failures: Sequence[Sequence[Failure]], memory: bool
                   ) -> Setup:
    """Return the setup with the intervals of saves that lose the least time; `memory`: with snapshots."""
    between, step = mtbf(per_day, setup.slots), setup.durations.step + setup.durations.data_wait

    def steps(cost: float, times: float) -> int:
        return max(1, round(min(MOST, times * daly(cost, between)) / step))

    disk = setup.durations.save_blocked + setup.durations.save_drag
    if not memory:
        return _best((_saving(setup, every, 0) for every in {steps(disk, times): None for times in _AROUND}), failures)
    short = {steps(setup.durations.snapshot_blocked, times): None for times in _AROUND[::2]}
    return _best((_saving(setup, max(every, steps(disk, rarer)), every) for every in short for rarer in _RARER),
                 failures)


def _saving(setup: Setup, every: int, snapshots: int) -> Setup:
    return dataclasses.replace(setup, checkpoint=CheckpointConfig(every=every, local_checkpoint_every=snapshots))


def _best(setups: Iterable[Setup], failures: Sequence[Sequence[Failure]]) -> Setup:
    """Return the setup with the highest mean goodput, to which time held up by saves is lost; of equal ones the first.
    """
    return max(setups, key=lambda setup: statistics.fmean(
        one.account.goodput for one in outcomes(setup, failures)))


def useful(prediction: Prediction) -> float:
    """Return the productive share of all machines that are paid for, spares included."""
    slots = prediction.setup.slots
    return prediction.middle * slots / (slots + prediction.setup.spares)


@dataclass(frozen=True)
class Advice:
    """The predictions for a run on so many machines, by tiers and by the number of spares."""

    mtbf: float  # seconds
    tiers: Sequence[Prediction]  # without spares: checkpoints only, and with snapshots
    spares: Sequence[Prediction]  # with the better of them, by number of spares, from 0 on

    @property
    def best(self) -> Prediction:
        """The number of spares with the largest productive share of all machines."""
        return max(self.spares, key=useful)


def advise(setup: Setup, per_day: Mapping[str, float], spares: Sequence[int], runs: int, seed: int,
           shape: float = 1.0) -> Advice:
    """Return the predictions for a setup."""
    failures = traces(per_day, setup, runs, seed, shape)
    # Intervals matter little to whether a machine is missing, so they are chosen where none is.
    long = dataclasses.replace(setup, spares=setup.slots, until=ENOUGH * mtbf(per_day, setup.slots))
    searched = traces(per_day, long, SEARCH, seed + runs, shape)
    chosen = [with_intervals(long, per_day, searched, memory) for memory in (False, True)]
    better = _best(chosen, searched).checkpoint
    tiers, with_spares = ([predict(dataclasses.replace(setup, checkpoint=saves, spares=number), failures, seed)
                           for saves, number in each] for each in (
        [(one.checkpoint, 0) for one in chosen], [(better, number) for number in spares]))
    return Advice(mtbf(per_day, setup.slots), tiers, with_spares)
