"""The cost of a job, by the planner's prices: at most, from its time limit; so far; and to the end of its run."""

import math
from pathlib import Path

from jaxtrain.files.bounded_files import user_json
from jaxtrain.launch.job_engines import engine_of
from jaxtrain.launch.job_record import Job, all_of
from jaxtrain.launch.job_spec import JobSpec
from jaxtrain.observe.goodput import account, incarnations
from jaxtrain.plan.targets import TARGETS, Target

_SAVES = {"checkpoint": {"every": int, "mtbf_hours": int | float}}


def target_of(spec: JobSpec) -> Target | None:
    """Return what the planner knows of a job's accelerators; None: nothing."""
    known = sorted((name for name in TARGETS if name != "cpu" and name in spec.accelerator.lower()), key=len)
    return TARGETS[known[-1]] if known and spec.accelerators_per_node else None


def dollars_an_hour(spec: JobSpec) -> float:
    """Return the price of all nodes of a job; 0: it is not known."""
    return _of_a_node(spec) * spec.nodes


def at_most(spec: JobSpec) -> str:
    """Return what a job costs until its time limit, as a line; "": it has none, or no price is known."""
    rate = dollars_an_hour(spec)
    return f"at most ${rate * spec.seconds / 3600:,.2f} until it is stopped after {spec.time}, at ${rate:,.2f} an " \
           "hour" if rate and spec.seconds else ""


def so_far(job: Job) -> str:
    """Return what the jobs of a workdir have cost; "": no price is known, or nothing has run.

    The engine's own accounts say it where there are any. A run's ledger, which says it otherwise, begins only when a
    process does.
    """
    if not (price := _of_a_node(job.spec)):
        return ""
    made = all_of(job.workdir)
    counted = [_node_hours(each) for each in made]
    if counted and None not in counted:
        hours = [each or 0.0 for each in counted]
        paid = math.fsum(each * _of_a_node(one.spec) for each, one in zip(hours, made, strict=True))
        return (f"${paid:,.2f} for {math.fsum(hours):,.2f} hours of a node, by {job.engine}'s accounts"
                if any(hours) else "")
    from jaxtrain.plan.cost import spending

    starts = incarnations(job.workdir)
    return spending.spent(price * job.spec.nodes, account(starts).lived) if starts else ""


def to_go(spec: JobSpec, workdir: Path) -> str:
    """Return what the rest of the run in a workdir will cost; "": no price is known, or no run has begun there."""
    starts = incarnations(workdir)
    found = user_json(workdir / "config.json", _SAVES, "WORKDIR", "see whether it is a run")
    if not found or not starts or not (rate := dollars_an_hour(spec)):
        return ""
    from jaxtrain.plan.cost import spending

    saves = found["checkpoint"]
    return spending.outlook(account(starts), rate, saves["every"], saves["mtbf_hours"],
                            spec.nodes * spec.processes)


def _of_a_node(spec: JobSpec) -> float:
    target = target_of(spec)
    return target.price * spec.devices_per_node if target else 0.0


def _node_hours(job: Job) -> float | None:
    count = getattr(engine_of(job.engine), "node_hours", None)
    return count(job) if count else None
