"""The money that a run has cost, and an estimate for the rest of it on on-demand and on spot machines.

A run's goodput ledger says how often it failed and was stopped, how long it takes to start, and what its saves cost. A
failure loses the work since the last save (the formula of checkpoint/save_policy.py) and a start; a stop, as by a spot
machine that is taken back, comes with a warning: the run saves, and loses that save and a start.
"""

import re

from jaxtrain.observe.goodput import Account, duration
from jaxtrain.plan.targets import TARGETS

SPOT = 0.4  # of the price: an assumption, since spot prices change from day to day


def of_run(life: Account, device_kind: str, devices: int) -> str:
    """Return what a run on devices that JAX calls so has cost; "": there is no price for them."""
    rate = price(device_kind) * devices
    return f"the run has cost about {spent(rate, life.lived)}" if rate else ""


def price(device_kind: str) -> float:
    """Return the dollars an hour of a device that JAX calls so; 0: it is not known."""
    return next((target.price for target in TARGETS.values() if target.platform != "cpu"
                 and re.fullmatch(target.device_kind, device_kind)), 0.0)


def spent(rate: float, seconds: float) -> str:
    """Return what so many seconds have cost, at so many dollars an hour."""
    return f"${rate * seconds / 3600:,.2f} for {seconds / 3600:,.2f} h at ${rate:,.2f} an hour"


def outlook(life: Account, rate: float, every: int, mtbf_hours: float = 0.0, processes: int = 1) -> str:
    """Return what the steps to go will cost on demand and on spot machines; "": there are none, or nothing is known.

    Args:
        rate: dollars an hour of all machines.
        every: steps between two saves; 0: none before the end.
        mtbf_hours: the time between failures that was expected (checkpoint.mtbf_hours).
        processes: of the run; without mtbf_hours they say how often it is expected to fail.
    """
    from jaxtrain.checkpoint.save_policy import PROCESS_MTBF, lost  # imports JAX, which listing runs does without

    done = life.step - min((one.resumed for one in life.incarnations if one.resumed is not None), default=0)
    steps = life.incarnations[-1].last_step - life.step
    if done <= 0 or steps <= 0:
        return ""
    seconds, starts, every = life.seconds, len(life.incarnations), every or life.incarnations[-1].last_step
    pace = (seconds["step"] + seconds["data_wait"] + seconds["eval"]) / done
    start = (seconds["init"] + seconds["compile"] + seconds["restore"]) / starts
    save = seconds["checkpoint"] * every / done
    mtbf = ((mtbf_hours * 3600 or PROCESS_MTBF / processes) + life.lived) / (1 + life.failures)  # as save_policy.py
    kept = (1 - lost(every * pace, save, mtbf)) * (1 - start / mtbf)
    stops = sum(one.ended == "stopped" for one in life.incarnations[:-1])
    each, work = start + save, steps * pace
    if kept <= 0:
        return ""
    demand = rate * work / kept / 3600
    said = f"the {steps:,} steps to go, {duration(work)} of training, will cost about ${demand:,.2f} on demand; "
    least = f"unless they are taken back more often than every {duration(each / (1 - SPOT))}"
    if not stops:
        return f"{said}spot machines at {SPOT:.0%} of the price are cheaper {least} (here: not once)"
    share = 1 - each * stops / life.lived
    spot = f"${demand * SPOT / share:,.2f}" if share > 0 else "without end"
    return (f"{said}{spot} on spot machines at {SPOT:.0%} of the price that are taken back every "
            f"{duration(life.lived / stops)}, as here; those are cheaper {least}")
