"""Validation of schedules."""

from itertools import pairwise

from jaxtrain.errors import UserError
from jaxtrain.parallel.schedules.schedule import KINDS, Hop, Op, Schedule


def validate(schedule: Schedule, key: str = "pipeline.schedule") -> Schedule:
    """Return the schedule if it can be run; raises a UserError about `key` otherwise.

    Every operation must occur exactly once, at a place and time at which its inputs are available.
    """
    p, v, m = schedule.stages, schedule.chunks, schedule.microbatches
    check_sizes(p, m, v, schedule.latency)
    if len(schedule.position) != p or sorted(g for row in schedule.position for g in row) != list(range(p * v)) \
            or any(len(row) != v for row in schedule.position):
        raise UserError(key, f"the placement {schedule.position} does not give {p} stages x {v} chunks "
                             f"the positions 0 to {p * v - 1}", "name each position once")
    for g, ((one, _), (other, _)) in enumerate(pairwise(schedule.place)):
        if (one - other) % p not in (0, 1, p - 1):
            raise UserError(key, f"positions {g} and {g + 1} are on stages {one} and {other}, which are not neighbours",
                            "place them on one stage or on neighbours")
    at = _once_each(schedule, key)
    on_ring: dict[tuple[int, int, Hop], Op] = {}
    for tick, stage, op in schedule.walk():
        where = f"stage {stage}, tick {tick}, {op}"
        for need in schedule.needs(stage, op):
            made = at[need.stage, need.op]
            if made + need.ticks > tick:
                raise UserError(key, f"{where}: its {need.what} ({need.op} of stage {need.stage}, tick {made}) "
                                     f"is not there before tick {made + need.ticks}"
                                     + " with pipeline.overlap" * (need.ticks == 2),
                                f"move {op} of stage {stage} right or {need.op} of stage {need.stage} left")
        hop = schedule.hop(stage, op)[0]
        if hop in (Hop.RIGHT, Hop.LEFT):
            other = on_ring.setdefault((tick, stage, hop), op)
            if other != op:
                raise UserError(key, f"{where}: its output and that of {other} both go {hop.name.lower()}",
                                f"move {op} or {other} to another tick")
    return schedule


def _once_each(schedule: Schedule, key: str) -> dict[tuple[int, Op], int]:
    """Return the tick of each operation, if none is missing, duplicated or unknown."""
    at: dict[tuple[int, Op], int] = {}
    for tick, row in enumerate(schedule.ticks):
        if len(row) != schedule.stages:
            raise UserError(key, f"tick {tick} has {len(row)} stages, not {schedule.stages}", "give each stage a cell")
    for tick, stage, op in schedule.walk():
        where = f"stage {stage}, tick {tick}, {op}"
        if op.kind not in tuple(KINDS) or not 0 <= op.microbatch < schedule.microbatches \
                or not 0 <= op.chunk < schedule.chunks:
            raise UserError(key, f"{where}: there is no such operation with {schedule.microbatches} micro-batches "
                                 f"and {schedule.chunks} chunks", "count from 0 and use F, B and W")
        if (stage, op) in at:
            raise UserError(key, f"{where}: it was done at tick {at[stage, op]} already", "do it once")
        at[stage, op] = tick
        kinds = [other.kind for other in schedule.ticks[tick][stage]]
        if kinds != sorted(set(kinds), key=KINDS.index):
            raise UserError(key, f"{where}: one tick has at most one F, then one B, then one W, not {' '.join(kinds)}",
                            "use another tick")
    present = {op.kind for _, op in at}
    kinds = "FBW" if "W" in present else "FB" if "B" in present else "F"
    for stage in range(schedule.stages):
        for m in range(schedule.microbatches):
            for c in range(schedule.chunks):
                for kind in kinds:
                    if (stage, Op(kind, m, c)) not in at:
                        raise UserError(key, f"stage {stage} never does {Op(kind, m, c)}, at none of its "
                                             f"{schedule.length} ticks", "add it" + (
                                                 ", or set pipeline.microbatches and pipeline.chunks to 0, which is "
                                                 "what the table has" if key == "pipeline.table" else ""))
    return at


def check_sizes(stages: int, microbatches: int, chunks: int, latency: int) -> None:
    """Refuse sizes that no schedule can have."""
    for key, size in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if size < 1:
            raise UserError(f"pipeline.{key}", f"{size} is less than one", "set it to 1 or more")
    if latency not in (1, 2):
        raise UserError("pipeline.latency", f"{latency} is neither 1 nor 2",
                        "set it to 1, or to 2 to overlap transfers")
