"""The definition of a schedule: a table of operations and the placement of its chunks, with statistics of both."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import accumulate

KINDS = "FBW"  # the order of the operations within a tick

Position = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Op:
    """One operation on one micro-batch, by one chunk of a stage."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Cell = tuple[Op, ...]


class Hop(IntEnum):
    """The direction in which an output is sent."""

    RIGHT, LEFT, SELF, NOWHERE = range(4)


@dataclass(frozen=True)
class Need:
    """An input of an operation: what it is, which operation makes it, and the minimum number of ticks between them."""

    what: str
    stage: int
    op: Op
    ticks: int


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: the work of every stage at every tick, and the order of chunks for a micro-batch."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    position: Position  # [stage][chunk], 0 ... stages x chunks - 1
    ticks: tuple[tuple[Cell, ...], ...]  # [tick][stage]
    latency: int = 1  # ticks from an output to its first use on another stage; 2: transfers overlap a tick

    @cached_property
    def place(self) -> tuple[tuple[int, int], ...]:
        """The (stage, chunk) of each position."""
        return tuple(sorted(((stage, chunk) for stage in range(self.stages) for chunk in range(self.chunks)),
                            key=lambda at: self.position[at[0]][at[1]]))

    @property
    def summary(self) -> str:
        """The schedule in a line of words."""
        return (f"{self.name}, {self.microbatches} micro-batches through {self.stages} stages x {self.chunks} chunks "
                f"in {self.length} ticks, {self.bubble_fraction:.0%} of them empty; "
                f"{max(map(self.in_flight, range(self.stages)))} inputs held")

    @property
    def length(self) -> int:
        """The number of ticks."""
        return len(self.ticks)

    @property
    def last(self) -> int:
        """The last position, where the loss is computed."""
        return self.stages * self.chunks - 1

    @cached_property
    def kinds(self) -> str:
        """The kinds of operations in it: F, FB or FBW."""
        present = {op.kind for _, _, op in self.walk()}
        return "".join(kind for kind in KINDS if kind in present)

    @cached_property
    def at(self) -> Mapping[tuple[int, Op], int]:
        """The tick of each (stage, operation)."""
        return {(stage, op): tick for tick, stage, op in self.walk()}

    def walk(self) -> Iterator[tuple[int, int, Op]]:
        """Yield every (tick, stage, operation), in order of execution."""
        for tick, row in enumerate(self.ticks):
            for stage, cell in enumerate(row):
                for op in cell:
                    yield tick, stage, op

    def needs(self, stage: int, op: Op) -> Iterator[Need]:
        """Yield the inputs of `op`."""
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

    def hop(self, stage: int, op: Op) -> tuple[Hop, int, int]:
        """Return the ring on which the output of `op` is sent, and the (stage, chunk) that receives it."""
        to = self.position[stage][op.chunk] + {"F": 1, "B": -1}.get(op.kind, self.last + 1)
        if not 0 <= to <= self.last:
            return Hop.NOWHERE, stage, op.chunk
        target, chunk = self.place[to]
        right, left = target == (stage + 1) % self.stages, target == (stage - 1) % self.stages
        if target == stage:
            return Hop.SELF, target, chunk
        if not (right or left):
            raise ValueError(f"stages {stage} and {target} are not neighbours")
        # Two stages are neighbours both ways: F to the right and B to the left never meet on one ring.
        goes_right = right and (op.kind == "F" or not left)
        return (Hop.RIGHT if goes_right else Hop.LEFT), target, chunk

    # ------------------------------------------------------------------------------------------------- statistics

    def idle(self, stage: int) -> int:
        """Return the number of ticks in which the stage does nothing."""
        return sum(not row[stage] for row in self.ticks)

    def bubble(self, stage: int) -> int:
        """Return the number of idle ticks between the stage's own first and last operation."""
        busy = [tick for tick, row in enumerate(self.ticks) if row[stage]]
        return busy[-1] - busy[0] + 1 - len(busy)

    @property
    def bubble_fraction(self) -> float:
        """The share of the table that is empty; where cells hold two operations, a cell with one is half empty."""
        room = max(len(cell) for row in self.ticks for cell in row)
        return 1 - len(self.at) / (self.length * self.stages * room)

    def in_flight(self, stage: int, until: str = "B") -> int:
        """Return the most chunk inputs held at once, each from its F until its B (or W) is done."""
        until = until if until in self.kinds else self.kinds[-1]
        return _peak((self.at[stage, Op("F", m, c)], self.at[stage, Op(until, m, c)])
                     for m in range(self.microbatches) for c in range(self.chunks))


def straight(stages: int, chunks: int) -> Position:
    """Return the placement in which every hop goes to the next stage, and from the last one to the first."""
    return tuple(tuple(chunk * stages + stage for chunk in range(chunks)) for stage in range(stages))


def v_shape(stages: int) -> Position:
    """Return the placement of two chunks per stage, to the last stage and back: the first stage has both ends."""
    return tuple((stage, 2 * stages - 1 - stage) for stage in range(stages))


def peak_activations(schedule: Schedule) -> int:
    """Return the most chunk inputs that any stage holds at once, waiting for B or W."""
    return max(schedule.in_flight(stage, until="W") for stage in range(schedule.stages))


def _peak(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the most of these intervals, ends included, that share a tick."""
    steps = sorted(step for begin, end in intervals for step in ((begin, 1), (end + 1, -1)))
    return max(accumulate(change for _, change in steps))
