"""Published runs as cases: what their reports give is the input, and the productive share they report is the judge.

What a report leaves out is assumed, and `Case.assumed` says so.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from jaxtrain.config.schema import CheckpointConfig, ResilienceConfig
from jaxtrain.simulation.failure_trace import DAY
from jaxtrain.simulation.predictions import Prediction, predict, traces
from jaxtrain.simulation.reported_rates import (
    BYTEROBUST_DAYS,
    BYTEROBUST_MACHINES,
    LLAMA3_DAYS,
    LLAMA3_MACHINES,
    LLAMA3_PLANNED,
    RATES,
)
from jaxtrain.simulation.run_durations import Durations
from jaxtrain.simulation.virtual_run import Setup


@dataclass(frozen=True)
class Case:
    """A published run: its failures, and setups by the inputs that they are given."""

    published: str
    interruptions: int
    unplanned: int  # of them
    per_day: Mapping[str, float]
    setups: Mapping[str, Setup]
    assumed: str

    def predictions(self, runs: int, seed: int) -> dict[str, Prediction]:
        """Return what is predicted with each set of inputs."""
        any_setup = next(iter(self.setups.values()))
        failures = traces(self.per_day, any_setup, runs, seed)
        return {name: predict(setup, failures, seed) for name, setup in self.setups.items()}


def _llama3() -> Case:
    machines = LLAMA3_MACHINES
    per_day = {**RATES["llama3"].per_day, "stop": LLAMA3_PLANNED / machines / LLAMA3_DAYS}
    # Start times on 16,384 GPUs: ByteRobust's table 7, whose requeue reallocates all machines.
    quick = Durations(step=10.0, launch=30.0, init=15.0, restore=10.0, compile=10.0, save_blocked=2.0, swap=0.0)
    slow = dataclasses.replace(quick, launch=733.0, save_blocked=13.0)

    def setup(durations: Durations, every: int) -> Setup:
        return Setup(machines, durations, CheckpointConfig(every=every), spares=machines // 16,
                     until=LLAMA3_DAYS * DAY)

    return Case("more than 90 % effective training time, 419 unexpected and 47 planned interruptions in 54 days",
                LLAMA3_PLANNED + 419, 419,
                per_day, {"started again in place in 65 s, saved every 5 minutes": setup(quick, 30),
                          "requeued in 768 s, saved every 15 minutes": setup(slow, 90)},
                "steps of 10 s; how long starts take and how often it was saved (not published; starts as on "
                "ByteRobust's 16,384 GPUs, table 7); that a spare machine was always there; 10 minutes of downtime for "
                "each planned interruption")


def _byterobust() -> Case:
    machines = BYTEROBUST_MACHINES
    rates = dict(RATES["byterobust"].per_day)
    rates["bug"] = rates.pop("process")  # rolled back by people
    mean = Durations(step=10.0, launch=93.0, init=0.0, restore=0.0, compile=0.0, save_blocked=6.77, silence=30.0,
                     snapshot_blocked=0.04, snapshot_stored=10.0, swap=0.0, fix=4289.0, maintenance=0.0)
    worst = dataclasses.replace(mean, launch=600.0, silence=600.0, fix=7200.0)

    def setup(durations: Durations, hang: float) -> Setup:
        return Setup(machines, durations, CheckpointConfig(every=180, local_checkpoint_every=1),
                     ResilienceConfig(hang_factor=1.0, hang_floor=hang), spares=machines // 16,
                     until=BYTEROBUST_DAYS * DAY)

    return Case("97 % ETTR in three months on 9,600 GPUs, 175 incidents", 175, 155, rates,
                {"the report's mean times": setup(mean, 600.0), "the report's longest times": setup(worst, 1800.0)},
                "steps of 10 s; that three months are 91 days; that each incident takes as long as CUDA errors (table "
                "6: mean 93 s, at most 600 s), each rollback as long as NaN values (mean 4,289 s, at most 7,200 s); "
                "that lost machines are noticed in 30 s (table 3) or, at worst, after PyTorch's 10 minutes, and hangs "
                "after 10 or 30 minutes (section 8.1.1); that a warm spare was always there")


CASES = {"llama3": _llama3, "byterobust": _byterobust}
