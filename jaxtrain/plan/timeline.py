"""Simulate a compiled step in the order that the compiler gave it: one stream computes, one talks, one copies.

Each instruction takes the time of its roofline. What is begun early (`all-gather-start`) runs beside computation until
its result is awaited (`all-gather-done`); the wait is exposed communication. Communication that runs beside computation
makes it slower: all but the share that the target's `overlap` says is exposed, too. A loop's body is simulated twice:
once as it begins, and once in the state in which all further ones begin.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxtrain.plan import hlo, kinds
from jaxtrain.plan.instructions import PREFETCHES, Instruction, Program
from jaxtrain.plan.roofline import Roofline
from jaxtrain.plan.targets import Target

COMPUTE, TALK, COPY = "computation", "communication", "copies"


@dataclass(frozen=True)
class Span:
    """One instruction on one stream, in seconds from the beginning of its computation's run."""

    stream: str
    kind: str
    begin: float
    end: float
    name: str


@dataclass
class Operation:
    """An instruction with what all its executions in a step take."""

    instruction: Instruction
    kind: str
    times: float = 0.0
    seconds: float = 0.0  # on its stream
    exposed: float = 0.0  # seconds for which computation waits for it
    dead: bool = False  # nothing reads its result


@dataclass
class Loop:
    """A loop's body, or the program itself: how often it runs in a step, and one run of it."""

    name: str
    times: float
    seconds: float
    spans: list[Span]


@dataclass
class Timeline:
    """The simulated step."""

    seconds: float
    operations: list[Operation]
    loops: list[Loop]

    def by_kind(self) -> dict[str, float]:
        """Return the seconds of computation by kind, and of exposed communication by kind and axis, largest first."""
        return self._sum(lambda one: one.exposed if kinds.is_sent(one.kind) else one.seconds)

    def hidden(self) -> dict[str, float]:
        """Return the seconds of communication and copies behind computation by kind, largest first."""
        return self._sum(lambda one: one.seconds - one.exposed if kinds.is_sent(one.kind) else 0.0)

    def _sum(self, cost: Callable[["Operation"], float]) -> dict[str, float]:
        found = defaultdict[str, float](float)
        for one in self.operations:
            found[one.kind] += cost(one)
        return dict(sorted(((kind, took) for kind, took in found.items() if took > 1e-9), key=lambda pair: -pair[1]))

    @property
    def exposed(self) -> float:
        """The seconds for which computation waits for communication and copies."""
        return sum(operation.exposed for operation in self.operations if kinds.is_sent(operation.kind))

    @property
    def dead(self) -> float:
        """The seconds of computation whose results nothing reads."""
        return sum(operation.seconds for operation in self.operations if operation.dead)

    @property
    def moved(self) -> float:
        """The bytes that one device moves outside matrix products, attention and collectives."""
        return sum(one.instruction.bytes * one.times for one in self.operations
                   if not one.instruction.flops and not kinds.is_sent(one.kind))

    @property
    def flops(self) -> float:
        """The FLOP of all products."""
        return sum(operation.instruction.flops * operation.times for operation in self.operations)


def simulate(program: Program, target: Target, mesh: Mapping[str, int], documents: int = 1) -> Timeline:
    """Simulate one step of a program on devices of the target in a mesh of these sizes.

    `documents`: of equal length in each row.
    """
    run = _Simulation(program, Roofline(target.among(math.prod(mesh.values())), program, mesh, documents), mesh)
    run.computation(program.entry, 1)
    operations = sorted(run.operations.values(), key=lambda one: -max(one.exposed, one.seconds))
    return Timeline(max(run.clock.values()), operations, list(run.loops.values()))


@dataclass
class _Simulation:
    program: Program
    roofline: Roofline
    mesh: Mapping[str, int]
    clock: dict[str, float] = field(default_factory=lambda: {COMPUTE: 0.0, TALK: 0.0, COPY: 0.0})
    under_way: dict[str, tuple[float, float, str, str]] = field(  # start -> its end, seconds, stream and operation
        default_factory=dict)
    operations: dict[str, Operation] = field(default_factory=dict)
    loops: dict[str, Loop] = field(default_factory=dict)
    _bodies: dict[str, list[str]] = field(default_factory=dict)

    def computation(self, name: str, times: float, show: bool = True) -> None:
        """Run a computation once; what it takes counts `times` times."""
        began, spans = self.clock[COMPUTE], list[Span]()
        used = {operand for one in self.program.computations[name] for operand in one.operands}
        for instruction in self.program.computations[name]:
            spans += self._run(instruction, times, not instruction.is_root and instruction.name not in used)
        if show:
            shifted = [Span(s.stream, s.kind, s.begin - began, s.end - began, s.name) for s in spans]
            ran = self.loops[name].times if name in self.loops else 0.0
            self.loops[name] = Loop(name, ran + times, self.clock[COMPUTE] - began, shifted)

    def _run(self, one: Instruction, times: float, dead: bool) -> list[Span]:
        if one.opcode == "while":
            self._loop(one, times)
        elif one.opcode == "conditional":
            self.computation(max(one.called, key=self._trial), times, show=False)
        elif one.opcode == "call":
            self.computation(one.called[0], times, show=False)
        elif one.opcode.endswith("-done"):
            self._await(one, times)
        elif inner := self._sent(one):
            return self._send(one, inner, times)
        else:
            seconds = self.roofline.seconds(one, self._kind(one, one))
            if seconds:
                return [self._spend(one, one, COMPUTE, seconds, times, dead and one.opcode != "custom-call")]
        return []

    def _loop(self, one: Instruction, times: float) -> None:
        trips = hlo.trips(one.text, self._lines())
        body = _named(one, "body")
        if not trips:
            return
        self.computation(body, times)
        if trips > 1:
            before = dict(self.clock)
            self.computation(body, times * (trips - 1))
            took = self.clock[COMPUTE] - before[COMPUTE]
            for stream in self.clock:
                self.clock[stream] += took * (trips - 2)
            self.under_way = {name: (one[0] + took * (trips - 2), *one[1:]) for name, one in self.under_way.items()}

    def _trial(self, name: str) -> float:
        """Return what a computation would take, without having run it."""
        trial = copy.copy(self)
        trial.clock, trial.under_way = dict(self.clock), dict(self.under_way)
        trial.operations, trial.loops = {}, {}
        trial.computation(name, 1, show=False)
        return trial.clock[COMPUTE]

    def _sent(self, one: Instruction) -> Instruction | None:
        """Return the collective that an instruction is or contains, or itself if it copies beside computation."""
        if one.collective or one.opcode in PREFETCHES:
            return one
        inside = one.called if one.opcode in ("async-start", "fusion", "fusion-start") else ()
        found = next((inner for name in inside for inner in self.program.inside(name) if inner.collective), None)
        return found or (one if one.bytes and (one.on_host or one.from_host) else None)

    def _send(self, one: Instruction, inner: Instruction, times: float) -> list[Span]:
        stream = TALK if inner.collective else COPY
        seconds = self.roofline.talking(inner) if inner.collective else self.roofline.seconds(one, kinds.COPIES)
        ends_itself = not one.opcode.endswith("-start") or '"is_sync":true' in one.text
        before = self.clock[COMPUTE]
        spans = [self._spend(one, inner, stream, seconds, times, False)]
        self.under_way[one.name] = self.clock[stream], 0.0 if ends_itself else seconds, stream, one.name
        if ends_itself:
            fused = 0.0
            if inner is not one and one.flops:  # a product that runs with it
                fused = self.roofline.seconds(one, kinds.MATMUL) + self._price(stream, seconds)
            wait = max(self.clock[stream] - before, fused)
            self.operations[one.name].exposed += times * wait
            self.clock[COMPUTE] = before + wait
        return spans

    def _await(self, one: Instruction, times: float) -> None:
        begun = next((self.under_way[name] for name in one.operands if name in self.under_way), None)
        if begun is None:
            return
        end, seconds, stream, who = begun
        wait = max(0.0, end - self.clock[COMPUTE])
        wait += self._price(stream, max(0.0, seconds - wait))
        self.clock[COMPUTE] += wait
        self.operations[who].exposed += times * wait

    def _price(self, stream: str, beside: float) -> float:
        """Return the seconds that computation is held up by what runs beside it for so many seconds."""
        return (1 - self.roofline.target.efficiency["overlap"]) * beside if stream == TALK else 0.0

    def _kind(self, one: Instruction, what: Instruction) -> str:
        if one.name in self.operations:
            return self.operations[one.name].kind
        return kinds.kind_of(what, self.program, self.mesh)

    def _spend(self, one: Instruction, what: Instruction, stream: str, seconds: float, times: float,
               dead: bool) -> Span:
        begin = self.clock[stream] if stream == COMPUTE else max(self.clock[stream], self.clock[COMPUTE])
        self.clock[stream] = begin + seconds
        if one.name not in self.operations:
            kind = kinds.COPIES if stream == COPY else self._kind(one, what)
            self.operations[one.name] = Operation(one, kind, dead=dead)
        operation = self.operations[one.name]
        operation.times += times
        operation.seconds += times * seconds
        return Span(stream, operation.kind, begin, begin + seconds, one.name)

    def _lines(self) -> dict[str, list[str]]:
        if not self._bodies:
            self._bodies.update({name: [one.text for one in body] for name, body in self.program.computations.items()})
        return self._bodies


def _named(one: Instruction, role: str) -> str:
    """Return the computation that an instruction calls in this role."""
    return one.text.partition(f"{role}=")[2].partition(",")[0].strip().lstrip("%")
