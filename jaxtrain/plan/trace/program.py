"""The program of one device: arrays of local size, FLOP, collectives, loops. `reader.py` derives it from a trace."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

Axes = tuple[str, ...]
GPUS = "cuda", "rocm"  # platforms whose collectives XLA compiles alike
Spec = tuple[Axes, ...]  # of each dimension, the mesh axes that split it


@dataclass(frozen=True)
class Collective:
    """Communication along mesh axes that leaves `bytes` of result on each device."""

    kind: str  # as in HLO
    axes: Axes
    bytes: int
    buffer: float = 1.0  # how many times the bytes that are sent at an even load have room in the result

    @property
    def sent(self) -> float:
        """The bytes of the result that arrive."""
        return self.bytes / self.buffer


@dataclass(eq=False)
class Value:
    """An array, as the part of it on each device."""

    shape: tuple[int, ...]  # of the whole array, which `spec` splits
    dtype: np.dtype
    spec: Spec
    bytes: int
    host: int = 0  # bytes of the part if it is in host memory, outside the device's
    op: "Op | None" = None  # where it comes from; None: from outside the block
    pending: Axes = ()  # devices along these axes hold partial sums


@dataclass(eq=False)
class Op:
    """One operation; `made` says whether its result takes memory: "real", "fused" into its readers, or a "view"."""

    name: str
    made: str
    inputs: list[Value]
    outputs: list[Value]
    flops: float = 0.0
    collectives: tuple[Collective, ...] = ()
    bodies: "list[Block]" = field(default_factory=list)  # one of a loop, several of branches
    times: int = 1  # how often the body runs
    carried: int = 0  # the first outputs of a loop that are its inputs, updated in place
    beside: list[Value] = field(default_factory=list)  # values that are kept until then, although it does not read them
    consts: int = 0  # the first inputs of a loop that are the same in all iterations
    shares: tuple[float, ...] = ()  # the share of layers that take each branch; empty where it is not known
    rounds: bool = False  # whether a product may round operands of float32: TF32 on GPUs, bfloat16 on TPUs
    scope: str = ""  # the part of the step with rates of its own that it comes from: "loss_head", "optimizer"
    attends: tuple[int, int] = (0, 0)  # of a kernel of attention: the width of a head, and the length of a row


@dataclass(eq=False)
class Block:
    """Straight-line code: the step, or the body of a loop."""

    inputs: list[Value]
    ops: list[Op]
    outputs: list[Value]

    def all(self, times: int = 1) -> Iterator[tuple[Op, int]]:
        """Yield every operation, also within loops and branches, and how often it runs if every branch is taken."""
        for op in self.ops:
            yield op, times
            for body in op.bodies:
                yield from body.all(times * op.times)
