"""Reduce a compiled program to what its simulation reads, so that it can be simulated again without compiling.

The result is text in the form of HLO that `jaxtrain.plan.instructions.program` reads: the loops, branches, collectives
and awaits of the original in its order, and each kernel with the cost that was counted for it, `counted={...}`.
Instructions that cost nothing, shapes and what fusions contain are left out; names are short.
"""

import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxtrain.plan import hlo, kinds
from jaxtrain.plan.instructions import COUNTED, Array, Instruction, Program, program
from jaxtrain.plan.trace.kernels import PHASE

_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=(?:\{\{.*?\}\}|\{\}"
                     r"|\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?|mesh\[.*?\].*?\{.*?\})")
_SCOPES = {kinds.ATTENTION: "attention", kinds.HEAD: "loss_head", kinds.OPTIMIZER: "optimizer"}


def write(path: Path, text: str) -> None:
    """Write a reduced program, compressed; equal programs give equal files."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(path: Path) -> Program:
    """Read a reduced program."""
    return program(gzip.decompress(path.read_bytes()).decode())


def reduced(made: Program, mesh: Mapping[str, int]) -> str:
    """Return a program on a mesh of these sizes as text with its costs."""
    writer = _Writer(made, mesh)
    writer.computation(made.entry)
    entry, *rest = (writer.done[name] for name in writer.order)
    header = f"HloModule step, num_partitions={made.devices}"
    return "\n\n".join([header, *reversed(rest), f"ENTRY {entry}"]) + "\n"


@dataclass
class _Writer:
    made: Program
    mesh: Mapping[str, int]
    done: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def name(self, name: str) -> str:
        return self.names.setdefault(name, f"i{len(self.names)}")

    def computation(self, name: str) -> None:
        if name in self.done:
            return
        self.done[name] = ""
        self.order.append(name)
        body = self.made.computations[name]
        lines = [(one, text) for one in body if (text := self.line(one))]
        kept, used = {one.name for one, _ in lines}, dict.fromkeys(name for one in body for name in one.operands)
        used |= dict.fromkeys(one.name for one in body if one.is_root)
        read = ", ".join(f"%{self.name(name)}" for name in used if name in kept)
        self.done[name] = "\n".join([f"%{self.name('of ' + name)} () {{", *(text for _, text in lines),
                                     f"  ROOT %{self.name('root of ' + name)} = () tuple({read})", "}"])

    def called(self, name: str) -> str:
        self.computation(name)
        return f"%{self.name('of ' + name)}"

    def line(self, one: Instruction) -> str:
        """Return the line of an instruction; "" for one that costs nothing."""
        if one.opcode == "while":
            lines = {name: [inner.text for inner in body] for name, body in self.made.computations.items()}
            turns = hlo.trips(one.text, lines)
            body = one.text.partition("body=")[2].partition(",")[0].strip().lstrip("%")
            return self._line(one, [], f'body={self.called(body)}, known_trip_count:{{"n":"{turns}"}}') if turns else ""
        if one.opcode == "conditional":
            return self._line(one, [], f"branch_computations={{{', '.join(map(self.called, one.called))}}}")
        if one.opcode == "call":
            return self._line(one, [], f"to_apply={self.called(one.called[0])}")
        if one.opcode.endswith("-done"):
            return self._line(one, [], "", one.operands[:1])
        if one.collective:
            return self._collective(one)
        inside = one.called if one.opcode in ("async-start", "fusion", "fusion-start") else ()
        if inner := next((inner for name in inside for inner in self.made.inside(name) if inner.collective), None):
            around = f"around {one.name}"
            self.order.append(around)
            self.done[around] = f"%{self.name('of ' + around)} () {{\n{self._collective(inner)}\n}}"
            return self._line(one, [], f"calls=%{self.name('of ' + around)}{self._sync(one)}, {self._costs(one)}")
        if not (one.flops or one.bytes):
            return ""
        kernel, kind = one.inner or one, kinds.kind_of(one, self.made, self.mesh)
        phase = PHASE.search(kernel.path) if one.attention else None
        path = "/".join(part for part in (_SCOPES.get(kind, ""), phase[0] if phase else "") if part)
        target = f', custom_call_target="{kernel.target}"' if one.attention else ""
        told = f', metadata={{op_name="{path}"}}' if path else ""
        opcode = "custom-call" if one.attention or one.opcode == "custom-call" else one.opcode
        return self._line(one, [], f"{self._costs(one)}{target}{told}", opcode=opcode)

    def _collective(self, one: Instruction) -> str:
        groups = _GROUPS.search(one.text)
        read = [self.made.operand(one, 0)] if one.collective == "ragged-all-to-all" else []
        more = f"{groups[0] if groups else 'replica_groups={}'}{self._sync(one)}, {self._costs(one)}"
        names = [f"operand of {one.name}"] if read else []
        first = f"  %{self.name(names[0])} = {_type(read)} parameter(0)\n" if names else ""
        return first + self._line(one, one.arrays, more, names)

    @staticmethod
    def _sync(one: Instruction) -> str:
        return ', "is_sync":true' if '"is_sync":true' in one.text else ""

    def _costs(self, one: Instruction) -> str:
        costs = {"flops": one.flops, "bytes": one.bytes, "dtype": one.dtype, "rounds": one.rounds,
                 "grouped": one.grouped, "masked": one.masked, "attends": list(one.attends) if any(one.attends) else 0,
                 "on_host": one.on_host, "from_host": one.from_host}
        costs = {key: int(value) if isinstance(value, float | bool) else value for key, value in costs.items() if value}
        return f"{COUNTED}{json.dumps(costs, separators=(',', ':'))}"

    def _line(self, one: Instruction, arrays: list[Array], more: str, operands: list[str] | None = None,
              opcode: str = "") -> str:
        read = ", ".join(f"%{self.name(name)}" for name in operands or ())
        return f"  %{self.name(one.name)} = {_type(arrays)} {opcode or one.opcode}({read}), {more}".rstrip(", ")


def _type(arrays: list[Array]) -> str:
    shapes = (f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in arrays)
    return f"({', '.join(shapes)})"
