"""Estimate the time of a step by part: each operation at the rate that limits it, minus what overlaps.

A matmul takes the longer of computing and moving; fused operations take the time to read and write memory. Collectives
of incoming weights and outgoing gradients overlap with computation, as far as the same loop has any, and as far as the
target's kernels do not disturb each other; collectives of activations do not overlap.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from jaxtrain.config.schema import AXES
from jaxtrain.kernels.attention import PACKED
from jaxtrain.parallel.schedules.schedule import Schedule
from jaxtrain.plan.cost import links, rates, traffic
from jaxtrain.plan.cost.memory import Reads
from jaxtrain.plan.targets import Target
from jaxtrain.plan.trace.program import Axes, Block, Collective, Op, Value

JOINED = 30 * 2**20  # bytes, by default
COPIES = "copies from and to hosts"
BEHIND = 0.3  # of them pass behind computation where it takes longer: 8b_h100x8_mlp_on_hosts of measurements/hlo.json


@dataclass
class Time:
    """The seconds of a step, by part; `hidden` is communication behind computation, by part, which costs nothing."""

    parts: Counter = field(default_factory=Counter)
    hidden: Counter = field(default_factory=Counter)
    flops: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of the whole step."""
        return sum(self.parts.values())

    def spend(self, seconds: float, part: str, hidden: float = 0.0) -> None:
        """Add seconds to a part, of which `hidden` pass behind computation."""
        self.parts.update({part: seconds - hidden})  # pyrefly: ignore[no-matching-overload]
        if hidden:
            self.hidden.update({part: hidden})  # pyrefly: ignore[no-matching-overload]

    def add(self, other: "Time", times: float = 1) -> None:
        """Add the parts of another time, `times` times."""
        self.parts.update({part: seconds * times for part, seconds in other.parts.items()})
        self.hidden.update({part: seconds * times for part, seconds in other.hidden.items()})
        self.flops += other.flops * times


def estimate(block: Block, target: Target, sizes: Mapping[str, int], schedule: Schedule | None = None) -> Time:
    """Estimate the time of a step on a mesh of these sizes; `schedule` is that of its pipeline stages, if any."""
    time = Time()
    _add(block, target.among(math.prod(sizes.values())), sizes, time, 1, schedule, is_step=True)
    return time


def _add(block: Block, target: Target, sizes: Mapping[str, int], time: Time, times: int,
         schedule: Schedule | None = None, is_step: bool = False) -> None:
    moved, loose, generation = traffic.moved(block, Reads(block)), _loose(block), _generations(block)
    computing, copying, waiting = 0.0, 0.0, defaultdict[tuple[str, Axes], list[float]](list)
    alike = defaultdict[tuple[str, Axes, int], list[float]](list)  # independent of each other, but not loose
    for op in block.ops:
        if schedule and op.name == "scan" and op.times == len(schedule.ticks) and _operations(op.bodies[0], schedule):
            time.add(_ticks(op.bodies[0], target, sizes, schedule), times)
        elif op.bodies:
            time.add(_longest(op, target, sizes, schedule), times * op.times)
        part, seconds = _own(op, moved[id(op)], target)
        for collective in op.collectives:
            if id(op) in loose:
                waiting[collective.kind, collective.axes].append(collective.sent)
            elif op.flops:  # a product that passes sums around
                talk = links.seconds(collective, target, sizes)
                time.spend(times * talk, said(collective.kind, collective.axes),
                           times * behind(talk, seconds, target))
            else:
                alike[collective.kind, collective.axes, generation[id(op)]].append(collective.sent)
        time.flops += op.flops * times
        if part == COPIES:
            copying += seconds
        elif seconds:
            time.spend(times * seconds, part)
            computing += seconds
    if copying:  # of what layers keep on hosts, by engines of their own; an optimizer's pieces are waited for
        of_layers = not is_step and any(op.flops for op in block.ops)
        hidden = min(BEHIND * copying, computing) if of_layers else 0.0
        time.spend(times * copying, COPIES, times * hidden)
    def joined(kind: str, axes: Axes, found: list[float]) -> float:
        return sum(links.seconds(Collective(kind, axes, int(size)), target, sizes) for size in _joined(found))

    for (kind, axes, _), found in alike.items():
        time.spend(times * joined(kind, axes, found), said(kind, axes))
    talking = {said(kind, axes): joined(kind, axes, found) for (kind, axes), found in waiting.items()}
    if talk := sum(talking.values()):
        share = behind(talk, computing, target) / talk
        for name, seconds in talking.items():
            time.spend(times * seconds, name, times * seconds * share)


def _longest(op: Op, target: Target, sizes: Mapping[str, int], schedule: Schedule | None = None) -> Time:
    """Return the time of a loop's body once, or of the longest branch, for which all other devices wait.

    Where layers choose a branch by their number, it is the mean over all layers.
    """
    each = [Time() for _ in op.bodies]
    for body, its in zip(op.bodies, each, strict=True):
        _add(body, target, sizes, its, 1, schedule)
    if op.shares:
        mean = Time()
        for its, share in zip(each, op.shares, strict=True):
            mean.add(its, share)
        return mean
    return max(each, key=lambda its: its.seconds)


def _operations(tick: Block, schedule: Schedule) -> list[Op]:
    """Return the branches of a pipeline's tick that compute: F, B and W, as far as the schedule has them."""
    branching = [op for op in tick.ops if op.name == "cond"]
    found = [op for op in branching if any(inner.flops for body in op.bodies for inner, _ in body.all())]
    return found if len(found) == len(schedule.kinds) else []


def _ticks(tick: Block, target: Target, sizes: Mapping[str, int], schedule: Schedule) -> Time:
    """Return the time of all ticks: each takes as long as its busiest stage, plus the work that all stages do."""
    time, operations = Time(), _operations(tick, schedule)
    rest = Block(tick.inputs, [op for op in tick.ops if op not in operations], tick.outputs)
    _add(rest, target, sizes, time, len(schedule.ticks))
    each = {kind: _longest(op, target, sizes) for kind, op in zip(
        [kind for kind in "FBW" if kind in schedule.kinds], operations, strict=True)}
    for row in schedule.ticks:
        for op in max(row, key=lambda cell: sum(each[op.kind].seconds for op in cell)):
            time.add(each[op.kind])
    return time


def said(kind: str, axes: Axes) -> str:
    """Return the name of a collective for the user."""
    return f"{kind} over {'+'.join(sorted(axes, key=AXES.index))}"


def _joined(sizes: list[float]) -> list[float]:
    """Join independent collectives of one kind, like XLA, as long as the result is not too large."""
    joined = [0.0]
    for size in sorted(sizes):
        if joined[-1] + size > JOINED and joined[-1]:
            joined.append(0.0)
        joined[-1] += size
    return joined


def behind(talking: float, computing: float, target: Target) -> float:
    """Return the seconds of communication that are hidden: never more than the computation."""
    return min(target.efficiency["overlap"] * talking, computing)


def _is_in_8_bits(name: str, value: Value) -> bool:
    """Return whether an operation of this name multiplies an array of 8-bit floats as such.

    XLA recognizes those that were widened, and perhaps laid out anew (sharding/products.py), in one product alone.
    """
    while name == "dot_general" and np.dtype(value.dtype).itemsize > 1:
        if value.op is None or len(value.op.inputs) != 1 or value.op.flops:
            return False
        value = value.op.inputs[0]
    return np.dtype(value.dtype).itemsize == 1 and jnp.issubdtype(value.dtype, jnp.floating)


def _own(op: Op, moved: int, target: Target) -> tuple[str, float]:
    """Return the part and the seconds of an operation on its own device."""
    if hosts := sum(value.host for value in (*op.inputs, *op.outputs)) if op.name == "device_put" else 0:
        return COPIES, hosts / target.host
    passing = {"loss_head": "passes", "optimizer": "optimizer"}.get(op.scope, "memory")
    at_memory = moved / (target.bandwidth * rates.of(target.efficiency, "memory" if op.flops else passing,
                                                     target.platform))
    if not op.flops:
        runs = moved and not op.collectives and not op.bodies
        return "memory", at_memory + target.launch if runs else 0.0
    dtype = np.dtype(op.inputs[0].dtype).name
    if "float8" in target.peak and len(op.inputs) > 1 and all(_is_in_8_bits(op.name, value) for value in op.inputs[:2]):
        dtype = "float4" if dtype.startswith("float4") and "float4" in target.peak else "float8"
    peak = target.products(dtype, op.rounds)
    kind = "attention" if op.name.startswith("attention") else "matmul"
    return kind, max(op.flops / (peak * _share(op, target)), at_memory) + target.launch


def _share(op: Op, target: Target) -> float:
    """Return the share of the peak that the products of an operation reach."""
    if op.name.startswith("attention"):
        own, masked = op.name.split("_")[1] in PACKED, len(op.inputs) > (6 if "backward" in op.name else 3)
        if not own and "flat_attention" in target.efficiency:  # of a kernel whose rate depends on no shape
            return target.efficiency["flat_attention"]
        kernel = op.name.split("_")[1] if own else "masked" if masked else "cudnn"
        share = rates.of(target.efficiency, kernel if own else "attention", target.platform)
        if target.platform != "cuda":
            return share
        return share * rates.attention(kernel, not op.name.endswith(("forward", "fwd")), *op.attends)
    kind = "grouped" if op.name.startswith("grouped_matmul") else "head" if op.scope == "loss_head" else "matmul"
    return rates.of(target.efficiency, kind, target.platform)


def _loose(block: Block) -> set[int]:
    """Return the collectives that do not depend on computation of this block, or on which none depends."""
    depends = _reached(block, forwards=True)
    awaited = _reached(block, forwards=False)
    return {id(op) for op in block.ops if op.collectives and (id(op) not in depends or id(op) not in awaited)}


def _generations(block: Block) -> dict[int, int]:
    """Return how many collectives come before each operation, one after another; those of one number are independent.
    """
    found, after = dict[int, int](), defaultdict[int, int](int)  # of operations, and of values
    for op in block.ops:
        found[id(op)] = max((after[id(value)] for value in op.inputs), default=0)
        for value in op.outputs:
            after[id(value)] = found[id(op)] + bool(op.collectives)
    return found


def _reached(block: Block, forwards: bool) -> set[int]:
    """Return the operations after (or before) any computation, along data dependencies."""
    marked: set[int] = set()
    values: set[int] = set()

    def given(op: Op) -> list[Value]:
        return op.inputs if forwards else op.outputs

    def passed(op: Op) -> list[Value]:
        return op.outputs if forwards else op.inputs

    for op in block.ops if forwards else reversed(block.ops):
        behind = any(id(value) in values for value in given(op))
        if behind:
            marked.add(id(op))
        if behind or op.flops or op.bodies:
            values.update(id(value) for value in passed(op))
    return marked
