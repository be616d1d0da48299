"""Failure traces: when what fails during a run, drawn from rates, or as the events of a real run tell it."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.observe.events import events
from jaxtrain.observe.goodput import account, incarnations

DAY = 86400.0
# What fails, and what it takes with it.
KINDS = {
    "process": "a process dies; its machine goes on",
    "machine": "a machine is lost, with what it holds in memory, until it is replaced",
    "hang": "no step completes any more, although nothing died",
    "bug": "a fault in code or data, which a person corrects before the run is started again",
    "storage": "the file system with the workdir is lost",
    "stop": "the run is told to stop, saves, and is started again",
}
_PROCESS = re.compile(r"process (\d+)")


@dataclass(frozen=True, order=True)
class Failure:
    """Something that fails at a time, in seconds since the run was first started."""

    at: float
    kind: str
    slot: int = 0  # the machine, or the process of a run on one machine


def drawn(per_slot_day: Mapping[str, float], slots: int, seconds: float, seed: int, shape: float = 1.0
          ) -> list[Failure]:
    """Return a trace that is drawn from rates: how often each kind comes in a day of one slot.

    Args:
        shape: of the Weibull distribution of the times between two failures of a slot; 1: exponential, less: failures
            come in clusters. The mean is that of the rate in either case.
    """
    dice = np.random.default_rng(seed)
    found = []
    for kind, rate in per_slot_day.items():
        if rate <= 0:
            continue
        mean = DAY / rate
        if shape == 1.0:  # all slots together fail as one that fails so much more often
            times = np.sort(dice.uniform(0, seconds, dice.poisson(seconds * slots / mean)))
            found += [Failure(float(at), kind, int(slot)) for at, slot in zip(
                times, dice.integers(0, slots, len(times)), strict=True)]
            continue
        scale = mean / math.gamma(1 + 1 / shape)
        at = -mean * dice.uniform(20, 21, slots)  # they have run for so long that their beginning no longer matters
        while (left := at < seconds).any():
            at[left] += scale * dice.weibull(shape, int(left.sum()))
            found += [Failure(float(at[slot]), kind, int(slot)) for slot in np.flatnonzero(left)
                      if 0 <= at[slot] < seconds]
    return sorted(found)


def observed(workdir: str | Path) -> tuple[dict[str, float], int]:
    """Return how often each kind of failure came in a day of one slot of a real run, and how many there were.

    Raises:
        UserError: the run has no ledger, or nothing failed in it, so that no rate is known.
    """
    found, starts = recorded(workdir), incarnations(workdir)
    slots = [len(event["slots"]) for event in events(workdir) if event["kind"] == "attempt" and event.get("slots")]
    days = account(starts).life * max(slots, default=0) / DAY if starts else 0.0
    if not days or all(one.kind == "stop" for one in found):
        raise UserError("--rates", f"nothing has failed in {workdir} under a supervisor", "name published rates")
    return {kind: count / days for kind, count in Counter(one.kind for one in found).items()}, len(found)


def recorded(workdir: str | Path) -> list[Failure]:
    """Return the trace of a run under the supervisor, from its events.

    A failure is dated by the event that says in how many seconds the run recovered from it, or where it did not, by the
    end of the attempt.
    """
    found, began, ended = [], None, []
    for event in events(workdir):
        kind, time = event["kind"], event.get("time")
        if not isinstance(time, int | float) or event.get("process") != "supervisor":
            continue
        began = time if began is None else began
        if kind == "restart":
            ended.append((time, str(event.get("why", ""))))
        elif kind == "recovered" and ended and isinstance(seconds := event.get("seconds"), int | float):
            ended[-1] = time - seconds, ended[-1][1]
    for time, why in ended:
        kind = "hang" if "no sign of life" in why or "gave up" in why else "stop" if "saved" in why else "process"
        slot = _PROCESS.match(why)
        found.append(Failure(time - (began or 0.0), kind, int(slot[1]) if slot else 0))
    return sorted(found)
