"""The table that the executor runs: a schedule as numbers, with a buffer slot for every waiting value."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from jaxtrain.parallel.schedules.schedule import Hop, Op, Schedule


class Column(IntEnum):
    """The columns that the executor reads for one stage at one tick; slot numbers equal to the slot count are trash.

    What was sent at tick t is stored in the slots of RIGHT_* and LEFT_* (from the right-going ring from stage - 1, from
    the left-going ring from stage + 1) at tick t + 1: before its operations at latency 1, after them at latency 2.
    """

    (F_ON, F_MB, F_CHUNK,
     F_IN,  # the activation slot of the input; at position 0, where to store the output of the embedding
     F_TO,  # a Hop
     F_SELF,  # the activation slot for the output, if F_TO is SELF
     B_ON, B_MB, B_CHUNK,
     B_IN,  # the activation slot of F's input
     B_GRAD,  # the gradient slot; trash at the last position, where the loss is
     B_STORE,  # the weight-gradient slot, which W reads
     B_TO,  # a Hop
     B_SELF,  # the gradient slot for the output, if B_TO is SELF
     W_ON, W_MB, W_CHUNK,
     W_FROM,  # the weight-gradient slot
     RIGHT_ACT, RIGHT_GRAD, LEFT_ACT, LEFT_GRAD) = range(22)


_ACTIVATION = (Column.F_IN, Column.F_SELF, Column.B_IN, Column.RIGHT_ACT, Column.LEFT_ACT)
_GRADIENT = (Column.B_GRAD, Column.B_SELF, Column.RIGHT_GRAD, Column.LEFT_GRAD)
_WEIGHT = (Column.B_STORE, Column.W_FROM)


@dataclass(frozen=True)
class Table:
    """A schedule with slots: int32 [ticks, stages, columns], and the numbers of slots besides the trash slot."""

    op: np.ndarray
    activations: int
    gradients: int
    weight_slots: int


def table(schedule: Schedule) -> Table:
    """Return the arrays the executor runs, with as few slots as values are live at once on some stage.

    An activation is live from its arrival (at position 0: from F) until the end of its B; a gradient from its arrival
    until the end of its B; what waits for W from B until the end of W.
    """
    at = schedule.at
    lives: dict[str, dict[tuple[int, Op], tuple[int, int]]] = {"act": {}, "grad": {}, "weight": {}}

    def arrival(stage: int, op: Op, what: str) -> int | None:
        for need in schedule.needs(stage, op):
            if need.what == what:
                made = at[need.stage, need.op]
                return made if need.stage == stage else made + schedule.latency
        return None

    for (stage, op), tick in at.items():  # a value is identified by the F or B that reads it
        if op.kind == "F":
            begin = arrival(stage, op, "input")
            end = at.get((stage, replace(op, kind="B")), tick)
            lives["act"][stage, op] = (tick if begin is None else begin, end)
        elif op.kind == "B":
            begin = arrival(stage, op, "gradient")
            if begin is not None:
                lives["grad"][stage, op] = (begin, tick)
            if "W" in schedule.kinds:
                lives["weight"][stage, op] = (tick, at[stage, replace(op, kind="W")])
    slots, counts = {}, {}
    for kind, intervals in lives.items():
        slots[kind], counts[kind] = _colour(intervals, schedule.stages)

    array = np.zeros((schedule.length, schedule.stages, len(Column)), np.int32)
    for columns, kind in ((_ACTIVATION, "act"), (_GRADIENT, "grad"), (_WEIGHT, "weight")):
        array[..., list(columns)] = counts[kind]
    array[..., [Column.F_TO, Column.B_TO]] = Hop.NOWHERE
    for (stage, op), tick in at.items():
        row, on = array[tick, stage], Column[f"{op.kind}_ON"]
        row[on:on + 3] = 1, op.microbatch, op.chunk
        kind = "act" if op.kind == "F" else "grad"
        if op.kind == "F":
            row[Column.F_IN] = slots["act"][stage, op]
        elif op.kind == "B":
            row[Column.B_IN] = slots["act"][stage, replace(op, kind="F")]
            row[Column.B_GRAD] = slots["grad"].get((stage, op), counts["grad"])
            row[Column.B_STORE] = slots["weight"].get((stage, op), counts["weight"])
        else:
            row[Column.W_FROM] = slots["weight"][stage, replace(op, kind="B")]
        hop, target, chunk = schedule.hop(stage, op)
        if hop == Hop.NOWHERE:
            continue
        slot = slots[kind][target, replace(op, chunk=chunk)]
        row[Column[f"{op.kind}_TO"]] = hop
        if hop == Hop.SELF:
            row[Column[f"{op.kind}_SELF"]] = slot
        else:
            array[tick + 1, target, Column[f"{hop.name}_{kind.upper()}"]] = slot
    array.flags.writeable = False
    return Table(array, counts["act"], counts["grad"], counts["weight"])


def _colour(lives: Mapping[tuple[int, Op], tuple[int, int]], stages: int) -> tuple[dict[tuple[int, Op], int], int]:
    """Assign a slot to each value, shared by none that are live at once; also return the number of slots per stage."""
    slots, count = {}, 0
    for stage in range(stages):
        free_from: list[int] = []  # for each slot
        mine = sorted((key for key in lives if key[0] == stage), key=lives.__getitem__)
        for key in mine:
            begin, end = lives[key]
            slot = next((i for i, tick in enumerate(free_from) if tick <= begin), len(free_from))
            free_from[slot:slot + 1] = [end + 1]
            slots[key] = slot
        count = max(count, len(free_from))
    return slots, count
