"""Modelled times of a schedule, given the times f, b and w of a stage with all its chunks for F, B and W.

Where there is no W, B takes b + w.
"""

from jaxtrain.parallel.schedules.schedule import Op, Schedule


def cost(schedule: Schedule, op: Op, f: float, b: float, w: float) -> float:
    """Return the time of one operation."""
    joint = 0 if "W" in schedule.kinds else w
    return {"F": f, "B": b + joint, "W": w}[op.kind] / schedule.chunks


def modelled_time(schedule: Schedule, f: float = 1, b: float = 1, w: float = 1) -> float:
    """Return the time in lockstep: each tick takes as long as its busiest stage."""
    return sum(max(sum(cost(schedule, op, f, b, w) for op in cell) for cell in row) for row in schedule.ticks)


def free_running_time(schedule: Schedule, f: float = 1, b: float = 1, w: float = 1) -> float:
    """Return the time without lockstep: each stage does its operations in order, as soon as their inputs are ready."""
    free, end = [0.0] * schedule.stages, {}
    for _, stage, op in schedule.walk():
        ready = max((end[need.stage, need.op] for need in schedule.needs(stage, op)), default=0.0)
        free[stage] = end[stage, op] = max(free[stage], ready) + cost(schedule, op, f, b, w)
    return max(free)


def ideal_time(schedule: Schedule, f: float = 1, b: float = 1, w: float = 1) -> float:
    """Return the time of a stage that never waits."""
    per_stage = schedule.microbatches * schedule.chunks
    return per_stage * sum(cost(schedule, Op(kind, 0), f, b, w) for kind in schedule.kinds)


def efficiency(schedule: Schedule, f: float = 1, b: float = 1, w: float = 1) -> float:
    """Return the share of the modelled time in which a stage works."""
    return ideal_time(schedule, f, b, w) / modelled_time(schedule, f, b, w)
