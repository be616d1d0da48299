"""Pipeline schedules as static tables: what each stage does at each tick, made, checked and counted in plain Python.

A model is cut into stages x chunks pieces; a micro-batch passes them in the order of their *position*. Operations:
F forward, B backward (the gradient of the input, and of the weights unless the schedule has W), W gradient of the
weights. Names and orders of operations are those of the papers:

    gpipe         all forwards, then all backwards                          arXiv 1811.06965
    1f1b          one forward, one backward; few activations held           PipeDream-flush in arXiv 2104.04473
    interleaved   1f1b over several chunks per stage, a smaller bubble      arXiv 2104.04473, section 2.2
    zb_h1         1f1b whose W fill the bubble, in the memory of 1f1b       arXiv 2401.10241
    zb_v          two chunks per stage placed in a V, smaller bubble yet    arXiv 2401.10241 and 2405.15362

`paired` schedules do up to one F and one B per stage and tick. Where all stages advance in lockstep, a tick lasts as
long as its longest operation: B beside another stage's F leaves that stage idle, F and B beside F and B does not.

    python -m jaxtrain.parallel.schedules --schedule=zb_h1 --stages=4 --microbatches=8     draws one
    python -m jaxtrain.parallel.schedules --report                                         compares them
"""

import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from jaxtrain.errors import UserError, nearest

KINDS = "FBW"  # the order of the operations of one tick
NAMES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")

Position = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Op:
    """One operation on one micro-batch, by one chunk of the stage that does it."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Cell = tuple[Op, ...]


@dataclass(frozen=True)
class Need:
    """Something an operation reads: what it is, who makes it, and how many ticks lie between."""

    what: str
    stage: int
    op: Op
    ticks: int


@dataclass(frozen=True)
class Schedule:
    """What every stage does at every tick, and in which order a micro-batch passes the chunks."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    position: Position  # [stage][chunk], 0 ... stages x chunks - 1
    ticks: tuple[tuple[Cell, ...], ...]  # [tick][stage]
    latency: int = 1  # from an output to the tick that may read it on another stage; 2: transfers overlap a tick

    @cached_property
    def place(self) -> tuple[tuple[int, int], ...]:
        """Where each position is: (stage, chunk)."""
        return tuple(sorted(((stage, chunk) for stage in range(self.stages) for chunk in range(self.chunks)),
                            key=lambda at: self.position[at[0]][at[1]]))

    @property
    def length(self) -> int:
        """In ticks."""
        return len(self.ticks)

    @property
    def last(self) -> int:
        """The last position, where the loss is."""
        return self.stages * self.chunks - 1

    @cached_property
    def kinds(self) -> str:
        """Which operations there are: F, FB or FBW."""
        present = {op.kind for _, _, op in self.walk()}
        return "".join(kind for kind in KINDS if kind in present)

    @cached_property
    def at(self) -> Mapping[tuple[int, Op], int]:
        """The tick of each (stage, operation)."""
        return {(stage, op): tick for tick, stage, op in self.walk()}

    def walk(self) -> Iterator[tuple[int, int, Op]]:
        """Every (tick, stage, operation), in the order in which they are done."""
        for tick, row in enumerate(self.ticks):
            for stage, cell in enumerate(row):
                for op in cell:
                    yield tick, stage, op

    def needs(self, stage: int, op: Op) -> Iterator[Need]:
        """What `op` reads."""
        here, m = self.position[stage][op.chunk], op.microbatch

        def sent(what: str, kind: str, position: int) -> Need:
            source, chunk = self.place[position]
            return Need(what, source, Op(kind, m, chunk), self.latency if source != stage else 1)

        if op.kind == "F" and here > 0:
            yield sent("input", "F", here - 1)
        if op.kind == "B":
            yield Need("stored input", stage, Op("F", m, op.chunk), 0)  # F goes before B in a tick
            if here < self.last:
                yield sent("gradient", "B", here + 1)
        if op.kind == "W":
            yield Need("stored gradient", stage, Op("B", m, op.chunk), 0)

    def hop(self, stage: int, op: Op) -> tuple["Hop", int, int]:
        """Over which ring the output of `op` goes, and to which (stage, chunk)."""
        to = self.position[stage][op.chunk] + {"F": 1, "B": -1}.get(op.kind, self.last + 1)
        if not 0 <= to <= self.last:
            return Hop.NOWHERE, stage, op.chunk
        target, chunk = self.place[to]
        right, left = target == (stage + 1) % self.stages, target == (stage - 1) % self.stages
        if target == stage:
            return Hop.SELF, target, chunk
        if not (right or left):
            raise ValueError(f"stages {stage} and {target} are no neighbours")
        # Two stages are neighbours both ways: F to the right and B to the left never meet on one ring.
        goes_right = right and (op.kind == "F" or not left)
        return (Hop.RIGHT if goes_right else Hop.LEFT), target, chunk

    # ------------------------------------------------------------------------------------------------- statistics

    def idle(self, stage: int) -> int:
        """Ticks of the whole table in which the stage does nothing."""
        return sum(not row[stage] for row in self.ticks)

    def bubble(self, stage: int) -> int:
        """Idle ticks between the stage's own first and last operation."""
        busy = [tick for tick, row in enumerate(self.ticks) if row[stage]]
        return busy[-1] - busy[0] + 1 - len(busy)

    @property
    def bubble_fraction(self) -> float:
        """The share of the table that is empty; where cells hold two operations, a cell with one is half empty."""
        room = max(len(cell) for row in self.ticks for cell in row)
        return 1 - len(self.at) / (self.length * self.stages * room)

    def in_flight(self, stage: int, until: str = "B") -> int:
        """The most inputs of chunks held at once, each from its F until its B (or W) is done."""
        until = until if until in self.kinds else self.kinds[-1]
        return _peak((self.at[stage, Op("F", m, c)], self.at[stage, Op(until, m, c)])
                     for m in range(self.microbatches) for c in range(self.chunks))


class Hop(IntEnum):
    """Where an output goes."""

    RIGHT, LEFT, SELF, NOWHERE = range(4)


# ------------------------------------------------------------------------------------------------------------- times
# f, b and w are the times of a stage with all its chunks; where there is no W, B takes b + w.


def cost(schedule: Schedule, op: Op, f: float, b: float, w: float) -> float:
    """The time of one operation."""
    joint = 0 if "W" in schedule.kinds else w
    return {"F": f, "B": b + joint, "W": w}[op.kind] / schedule.chunks


def modelled_time(schedule: Schedule, f: float = 1, b: float = 1, w: float = 1) -> float:
    """In lockstep: each tick takes as long as its busiest stage."""
    return sum(max(sum(cost(schedule, op, f, b, w) for op in cell) for cell in row) for row in schedule.ticks)


def free_running_time(schedule: Schedule, f: float = 1, b: float = 1, w: float = 1) -> float:
    """Without lockstep: each stage does its operations in order, each as soon as what it reads is there."""
    free, end = [0.0] * schedule.stages, {}
    for _, stage, op in schedule.walk():
        ready = max((end[need.stage, need.op] for need in schedule.needs(stage, op)), default=0.0)
        free[stage] = end[stage, op] = max(free[stage], ready) + cost(schedule, op, f, b, w)
    return max(free)


def ideal_time(schedule: Schedule, f: float = 1, b: float = 1, w: float = 1) -> float:
    """Of a stage that never waits."""
    per_stage = schedule.microbatches * schedule.chunks
    return per_stage * sum(cost(schedule, Op(kind, 0), f, b, w) for kind in schedule.kinds)


def efficiency(schedule: Schedule, f: float = 1, b: float = 1, w: float = 1) -> float:
    """The share of the modelled time in which a stage works."""
    return ideal_time(schedule, f, b, w) / modelled_time(schedule, f, b, w)


# ------------------------------------------------------------------------------------------------------------ making


def make(name: str, stages: int, microbatches: int, chunks: int = 1, *, paired: bool = False,
         latency: int = 1) -> Schedule:
    """The schedule of this name, validated."""
    if name not in NAMES:
        raise UserError("pipeline.schedule", f"{name!r} is no schedule", nearest(name, NAMES))
    _check_sizes(stages, microbatches, chunks, latency)
    if name == "interleaved" and chunks < 2:
        raise UserError("pipeline.chunks", f"interleaved has several chunks per stage, not {chunks}",
                        "set it to 2 or more, or use 1f1b")
    if name in ("1f1b", "zb_h1") and chunks != 1:
        raise UserError("pipeline.chunks", f"{name} has 1 chunk per stage, not {chunks}",
                        "set it to 1, or use interleaved")
    if name == "zb_v" and chunks != 2:
        raise UserError("pipeline.chunks", f"zb_v has 2 chunks per stage, not {chunks}", "set it to 2")
    if paired and name.startswith("zb_"):
        raise UserError("pipeline.paired", f"{name} has one operation per tick", "leave it out, or use 1f1b")
    empty = Schedule(name, stages, microbatches, chunks, straight(stages, chunks), (), latency)
    return validate(_zb_v(replace(empty, position=v_shape(stages))) if name == "zb_v" else _in_order(empty, paired))


def forward_only(stages: int, microbatches: int, chunks: int = 1, *, latency: int = 1,
                 position: Position | None = None) -> Schedule:
    """Forwards alone, for evaluation."""
    _check_sizes(stages, microbatches, chunks, latency)
    position = position or straight(stages, chunks)
    empty = Schedule("forward_only", stages, microbatches, chunks, position, (), latency)
    if position == straight(stages, chunks):
        return validate(_in_order(empty, paired=False, kinds="F"))
    todo = [[Op("F", m, c) for m in range(microbatches) for c in range(chunks)] for _ in range(stages)]

    def turn(stage: int, place: Callable[[Op], bool]) -> None:
        # The chunk nearest the end first: what has entered leaves before more enters.
        waiting = sorted(todo[stage], key=lambda op: (-position[stage][op.chunk], op.microbatch))
        done = next((op for op in waiting if place(op)), None)
        if done:
            todo[stage].remove(done)

    return validate(_fill(empty, turn, "F"))


def straight(stages: int, chunks: int) -> Position:
    """Every hop goes to the next stage, from the last one to the first."""
    return tuple(tuple(chunk * stages + stage for chunk in range(chunks)) for stage in range(stages))


def v_shape(stages: int) -> Position:
    """Two chunks: to the last stage and back, so that the first stage has both the beginning and the end."""
    return tuple((stage, 2 * stages - 1 - stage) for stage in range(stages))


def _check_sizes(stages: int, microbatches: int, chunks: int, latency: int) -> None:
    for key, size in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if size < 1:
            raise UserError(f"pipeline.{key}", f"{size} is less than one", "set it to 1 or more")
    if latency not in (1, 2):
        raise UserError("pipeline.latency", f"{latency} is neither 1 nor 2",
                        "set it to 1, or to 2 to overlap transfers")


def _fill(empty: Schedule, turn: Callable[[int, Callable[[Op], bool]], None], kinds: str) -> Schedule:
    """Tick after tick, each stage has its turn to place operations, until all are placed.

    `turn(stage, place)` offers operations; `place` takes one whose needs are met and says whether it did.
    """
    at: dict[tuple[int, Op], int] = {}
    ticks: list[tuple[Cell, ...]] = []
    total = len(kinds) * empty.stages * empty.microbatches * empty.chunks
    while len(at) < total:
        tick, row = len(ticks), []
        for stage in range(empty.stages):
            cell: list[Op] = []

            def place(op: Op, stage: int = stage, cell: list[Op] = cell, tick: int = tick) -> bool:
                in_turn = not cell or KINDS.index(op.kind) > KINDS.index(cell[-1].kind)
                met = all(at.get((need.stage, need.op), tick) + need.ticks <= tick and (need.stage, need.op) in at
                          for need in empty.needs(stage, op))
                if in_turn and met:
                    cell.append(op)
                    at[stage, op] = tick
                return in_turn and met

            turn(stage, place)
            row.append(tuple(cell))
        ticks.append(tuple(row))
        assert len(ticks) <= total * (1 + empty.latency), f"{empty.name} cannot go on"
    return replace(empty, ticks=tuple(ticks))


def _in_order(empty: Schedule, paired: bool, kinds: str = "") -> Schedule:
    """Each stage: forwards to warm up, then F and B in turn (W some B later), then what is left.

    How many forwards warm up decides all else. They last until the first gradient comes back: a round trip.
    """
    kinds = kinds or ("FBW" if empty.name == "zb_h1" else "FB")
    p, v, hop = empty.stages, empty.chunks, empty.latency
    groups = _groups(empty.microbatches, hop * p)
    order = {"F": [(m, c) for group in groups for c in range(v) for m in group],
             "B": [(m, c) for group in groups for c in reversed(range(v)) for m in group]}
    order["W"] = order["B"]
    n = len(order["F"])
    done: list[dict[str, int]] = [dict.fromkeys(KINDS, 0) for _ in range(p)]

    def warmup(stage: int) -> int:
        if empty.name in ("gpipe", "forward_only"):
            return n
        # Without pairs a stage does a forward every other tick, so half a round trip of them is enough. Interleaved,
        # a group's chunks follow each other at one forward per tick.
        way = hop * (p - 1 - stage)
        return way if v == 1 and not paired else 2 * way + (v - 1) * len(groups[0])

    def due(stage: int) -> str:
        f, b, w = done[stage].values()
        # Putting W off by as many B as stages came before keeps the last gradient on its way back to the first stage,
        # and holds as many activations on every stage as the first one needs.
        if "W" in kinds and w < (b - hop * stage if b < n else n):
            return "W"
        return "F" if f < min(n, warmup(stage) + 1 + b) else "B"

    def turn(stage: int, place: Callable[[Op], bool]) -> None:
        for _ in range(2 if paired else 1):
            if sum(done[stage].values()) == n * len(kinds):
                return
            kind = due(stage)
            if not place(Op(kind, *order[kind][done[stage][kind]])):
                return
            done[stage][kind] += 1

    return _fill(empty, turn, kinds)


def _groups(microbatches: int, least: int) -> list[range]:
    """Micro-batches that pass a chunk together: at least so many as to fill the ring, sizes as even as can be."""
    count = max(1, microbatches // least)
    ends = [-(-microbatches * i // count) for i in range(count + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def _zb_v(empty: Schedule) -> Schedule:
    """Greedy: what frees memory first, forwards while there is room for two per stage of the model, W to fill in."""
    p, m = empty.stages, empty.microbatches
    room = 2 * (empty.latency * (p - 1) + 1)
    done = [{(kind, chunk): 0 for kind in KINDS for chunk in range(2)} for _ in range(p)]

    def turn(stage: int, place: Callable[[Op], bool]) -> None:
        mine = done[stage]
        held = sum(mine["F", c] - mine["W", c] for c in range(2))
        # Room for the second half of a micro-batch that has entered is kept free, or it could never leave.
        rooms = {("F", 0): room - 1, ("F", 1): room}
        for kind, chunk in (("F", 1), ("B", 0), ("B", 1), ("F", 0), ("W", 1), ("W", 0)):
            count = mine[kind, chunk]
            if count < m and held < rooms.get((kind, chunk), room + 1) and place(Op(kind, count, chunk)):
                mine[kind, chunk] += 1
                return

    return _fill(empty, turn, "FBW")


# -------------------------------------------------------------------------------------------------------- validation


def validate(schedule: Schedule, key: str = "pipeline.schedule") -> Schedule:
    """The schedule itself, if every operation is done once, where and when it can be; else a UserError about `key`."""
    p, v, m = schedule.stages, schedule.chunks, schedule.microbatches
    _check_sizes(p, m, v, schedule.latency)
    if len(schedule.position) != p or sorted(g for row in schedule.position for g in row) != list(range(p * v)) \
            or any(len(row) != v for row in schedule.position):
        raise UserError(key, f"the placement {schedule.position} does not give {p} stages x {v} chunks "
                             f"the positions 0 to {p * v - 1}", "name each position once")
    for g, ((one, _), (other, _)) in enumerate(pairwise(schedule.place)):
        if (one - other) % p not in (0, 1, p - 1):
            raise UserError(key, f"positions {g} and {g + 1} are on stages {one} and {other}, which are no neighbours",
                            "place them on one stage or on neighbours")
    at = _once_each(schedule, key)
    on_ring: dict[tuple[int, int, Hop], Op] = {}
    for tick, stage, op in schedule.walk():
        where = f"stage {stage}, tick {tick}, {op}"
        for need in schedule.needs(stage, op):
            made = at[need.stage, need.op]
            if made + need.ticks > tick:
                raise UserError(key, f"{where}: its {need.what} ({need.op} of stage {need.stage}, tick {made}) "
                                     f"is not there before tick {made + need.ticks}", f"move {op} or {need.op}")
        hop = schedule.hop(stage, op)[0]
        if hop in (Hop.RIGHT, Hop.LEFT):
            other = on_ring.setdefault((tick, stage, hop), op)
            if other != op:
                raise UserError(key, f"{where}: its output and that of {other} both go {hop.name.lower()}",
                                f"move {op} or {other} to another tick")
    return schedule


def _once_each(schedule: Schedule, key: str) -> dict[tuple[int, Op], int]:
    """The tick of each operation, if none is missing, doubled or unknown."""
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
                                             f"{schedule.length} ticks", "add it")
    return at


# ------------------------------------------------------------------------------------------- the table for execution


class Column(IntEnum):
    """What the executor reads of one stage at one tick. Slot numbers equal to the count of slots are trash.

    What was sent at tick t is written into the slots of RIGHT_* and LEFT_* (come over the right-going ring from
    stage - 1, over the left-going ring from stage + 1) at tick t + 1: before its operations at latency 1, after
    them at latency 2.
    """

    (F_ON, F_MB, F_CHUNK,
     F_IN,    # the activation slot of the input; at position 0, where the output of the embedding is to be stored
     F_TO,    # a Hop
     F_SELF,  # the activation slot that the output is written to at once, where F_TO is SELF
     B_ON, B_MB, B_CHUNK,
     B_IN,    # the activation slot of the input of F
     B_GRAD,  # the gradient slot; trash at the last position, where the loss is
     B_STORE,  # the weight-gradient slot, which W reads
     B_TO,    # a Hop
     B_SELF,  # the gradient slot that the output is written to at once, where B_TO is SELF
     W_ON, W_MB, W_CHUNK,
     W_FROM,  # the weight-gradient slot
     RIGHT_ACT, RIGHT_GRAD, LEFT_ACT, LEFT_GRAD) = range(22)


_ACTIVATION = (Column.F_IN, Column.F_SELF, Column.B_IN, Column.RIGHT_ACT, Column.LEFT_ACT)
_GRADIENT = (Column.B_GRAD, Column.B_SELF, Column.RIGHT_GRAD, Column.LEFT_GRAD)
_WEIGHT = (Column.B_STORE, Column.W_FROM)


@dataclass(frozen=True)
class Table:
    """A schedule with slots: int32 [ticks, stages, columns], and how many slots there are beside the one for trash."""

    op: np.ndarray
    activations: int
    gradients: int
    weight_slots: int


def table(schedule: Schedule) -> Table:
    """The arrays the executor runs, with as few slots as values live at once on some stage."""
    at = schedule.at
    lives: dict[str, dict[tuple[int, Op], tuple[int, int]]] = {"act": {}, "grad": {}, "weight": {}}

    def arrival(stage: int, op: Op, what: str) -> int | None:
        for need in schedule.needs(stage, op):
            if need.what == what:
                made = at[need.stage, need.op]
                return made if need.stage == stage else made + schedule.latency
        return None

    for (stage, op), tick in at.items():  # a value is known by the F or B that reads it
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
        row, forward = array[tick, stage], replace(op, kind="F")
        on = Column[f"{op.kind}_ON"]
        row[on:on + 3] = 1, op.microbatch, op.chunk
        if op.kind == "W":
            row[Column.W_FROM] = slots["weight"][stage, replace(op, kind="B")]
            continue
        hop, target, chunk = schedule.hop(stage, op)
        kind = "act" if op.kind == "F" else "grad"
        if op.kind == "F":
            row[Column.F_IN] = slots["act"][stage, op]
        else:
            row[Column.B_IN] = slots["act"][stage, forward]
            row[Column.B_GRAD] = slots["grad"].get((stage, op), counts["grad"])
            row[Column.B_STORE] = slots["weight"].get((stage, op), counts["weight"])
        row[Column[f"{op.kind}_TO"]] = hop
        if hop == Hop.NOWHERE:
            continue
        slot = slots[kind][target, replace(op, chunk=chunk)]
        if hop == Hop.SELF:
            row[Column[f"{op.kind}_SELF"]] = slot
        else:
            array[tick + 1, target, Column[f"{hop.name}_{kind.upper()}"]] = slot
    array.flags.writeable = False
    return Table(array, counts["act"], counts["grad"], counts["weight"])


def _peak(intervals: Iterable[tuple[int, int]]) -> int:
    """The most of these intervals, ends included, that share a tick."""
    steps = sorted(step for begin, end in intervals for step in ((begin, 1), (end + 1, -1)))
    return max(accumulate(change for _, change in steps))


def _colour(lives: Mapping[tuple[int, Op], tuple[int, int]],
            stages: int) -> tuple[dict[tuple[int, Op], int], int]:
    """A slot for each value, none shared while both live; and how many that takes, the same on every stage."""
    slots: dict[tuple[int, Op], int] = {}
    count = 0
    for stage in range(stages):
        free_from: list[int] = []  # of each slot
        mine = sorted(((life, key) for key, life in lives.items() if key[0] == stage), key=lambda item: item[0])
        for (begin, end), key in mine:
            slot = next((i for i, tick in enumerate(free_from) if tick <= begin), len(free_from))
            free_from[slot:slot + 1] = [end + 1]
            slots[key] = slot
        count = max(count, len(free_from))
    return slots, count


# ------------------------------------------------------------------------------------------------------------- files


def from_file(path: str | Path, stages: int, microbatches: int, chunks: int = 1, *, latency: int = 1) -> Schedule:
    """A table of one's own, validated.

    CSV has one row a stage and one column a tick. A cell is empty or names operations: `F3`, `B0`, `W2`, `F3.1` for
    chunk 1, `F3+B1` for two. JSON is {"stages": [[cell, ...] of stage 0, ...]} with such cells, and may have a "name"
    and a "position": [[position of each chunk] of each stage]; otherwise the placement is `straight`.
    """
    key, path = "pipeline.table", Path(path)
    _check_sizes(stages, microbatches, chunks, latency)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(key, f"{path} cannot be read ({type(error).__name__})", "give a CSV or JSON file") from error
    name, position, rows = path.stem, straight(stages, chunks), []
    if path.suffix == ".json":
        name, position, rows = _from_json(text, key, path, name, position)
    else:
        rows = [row for row in csv.reader(text.splitlines()) if row]
    if len(rows) != stages:
        raise UserError(key, f"{path} has {len(rows)} rows for {stages} stages", "give each stage one row")
    length = max(map(len, rows))
    cells = [[_parse(cell, key, stage, tick) for tick, cell in enumerate(row)] + [()] * (length - len(row))
             for stage, row in enumerate(rows)]
    schedule = Schedule(name, stages, microbatches, chunks, position, tuple(zip(*cells, strict=True)), latency)
    if "B" not in schedule.kinds:
        raise UserError(key, f"{path} has no B, so it would train nothing", "add the backwards")
    return validate(schedule, key)


def _from_json(text: str, key: str, path: Path, name: str,
               position: Position) -> tuple[str, Position, list[list[str]]]:
    try:
        content = json.loads(text)
        rows = [[str(cell) for cell in row] for row in content["stages"]]
        position = tuple(tuple(map(int, row)) for row in content.get("position", position))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(key, f"{path} is not of the form expected ({type(error).__name__}: {error})",
                        'write {"stages": [["F0", "", "B0"], ...]}') from error
    return str(content.get("name", name)), position, rows


def _parse(cell: str, key: str, stage: int, tick: int) -> Cell:
    words = [word.strip() for word in cell.split("+")] if cell.strip() else []
    found = [re.fullmatch(r"([FBW])(\d+)(?:\.(\d+))?", word) for word in words]
    if not all(found):
        raise UserError(key, f"stage {stage}, tick {tick}: {cell!r} names no operation",
                        "write F3, B0, W2, F3.1 for chunk 1, or F3+B1 for two")
    return tuple(Op(match[1], int(match[2]), int(match[3] or 0)) for match in found if match)


def _cells(schedule: Schedule) -> list[list[str]]:
    return [["+".join(map(str, row[stage])) for row in schedule.ticks] for stage in range(schedule.stages)]


def to_csv(schedule: Schedule, path: str | Path) -> None:
    """Write what `from_file` reads; only a straight placement, for CSV has no place for another."""
    if schedule.position != straight(schedule.stages, schedule.chunks):
        raise UserError("pipeline.table", f"CSV cannot say where {schedule.name} places its chunks", "write JSON")
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(_cells(schedule))


def to_json(schedule: Schedule, path: str | Path) -> None:
    """Write what `from_file` reads."""
    content = {"name": schedule.name, "position": schedule.position, "stages": _cells(schedule)}
    Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from jaxtrain.parallel.drawing import main

    sys.exit(main())
