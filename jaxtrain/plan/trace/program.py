"""What one device does in a step: arrays of its own size, FLOP, collectives, loops. `reader.py` makes it of a trace."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]  # of each dimension, the mesh axes that split it


@dataclass(frozen=True)
class Collective:
    """Devices that talk: along these mesh axes, each left with `bytes` of result."""

    kind: str  # as HLO has it
    axes: Axes
    bytes: int


@dataclass(eq=False)
class Value:
    """An array, as each device holds its part of it."""

    shape: tuple[int, ...]  # of the whole where `spec` splits it
    dtype: np.dtype
    spec: Spec
    bytes: int
    host: int = 0  # bytes of the part, where it lies in the host's memory and takes none of the device's
    op: "Op | None" = None  # where it comes from; None: from outside the block
    pending: Axes = ()  # devices along these hold parts whose sum it is


@dataclass(eq=False)
class Op:
    """One operation. `made` says whether its result takes memory: "real", "fused" into who uses it, or a "view"."""

    name: str
    made: str
    inputs: list[Value]
    outputs: list[Value]
    flops: float = 0.0
    collectives: tuple[Collective, ...] = ()
    bodies: "list[Block]" = field(default_factory=list)  # of a loop one, of branches several
    times: int = 1  # that the body runs
    carried: int = 0  # the first so many of a loop's outputs are its inputs, updated in place
    beside: list[Value] = field(default_factory=list)  # what is kept until then, though it does not read it
    consts: int = 0  # the first so many inputs of a loop are the same for all rounds
    shares: tuple[float, ...] = ()  # of the layers, by the branch that they take; empty where that is not known


@dataclass(eq=False)
class Block:
    """Straight code: the step, or the body of a loop."""

    inputs: list[Value]
    ops: list[Op]
    outputs: list[Value]

    def all(self, times: int = 1) -> Iterator[tuple[Op, int]]:
        """Every operation, within loops and branches too, and how often it runs where every branch is taken."""
        for op in self.ops:
            yield op, times
            for body in op.bodies:
                yield from body.all(times * op.times)
