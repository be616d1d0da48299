"""Parse the collectives of a compiled program: kind, shapes, bytes on each device, and executions per step."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxtrain.parallel.experts import OVERFLOW
from jaxtrain.plan.trace.device_groups import Groups, device_groups

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all", "ragged-all-to-all")
BYTES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "u16": 2,
         "s8": 1, "u8": 1, "pred": 1}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r" = (\([^=]*?\)|\S+) ([a-z][a-z\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")
_CALLED = re.compile(r"(?:to_apply|calls|body|(?:true|false)_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')


@dataclass(frozen=True)
class Collective:
    """One collective instruction; its result may be several arrays."""

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]  # (dtype, dimensions) of each result, on one device
    times: int  # executions in one call of the program; in a branch of a conditional, as if it were always taken
    operation: str  # where in the model it comes from
    groups: Groups  # the devices that it joins; of a permutation, each (source, target)
    conditional: bool  # whether it is in a branch, which some devices may not take

    @property
    def bytes(self) -> int:
        """The bytes of the result on one device, over all executions."""
        return self.times * sum(math.prod(dims) * BYTES[dtype] for dtype, dims in self.arrays)

    def __str__(self) -> str:
        shapes = ", ".join(f"{dtype}{list(dims)}" for dtype, dims in self.arrays)
        return f"{self.bytes:>9,} B  {self.kind} {self.times} x ({shapes})  {self.operation}"

    def joins(self, axis: str, mesh: Mapping[str, int]) -> bool:
        """Return whether it joins devices with different coordinates on an axis of a mesh of these sizes."""
        at = np.unravel_index(np.arange(math.prod(mesh.values())), tuple(mesh.values()))[list(mesh).index(axis)]
        return any(len({int(at[device]) for device in group}) > 1 for group in self.groups)


def collectives(text: str) -> list[Collective]:
    """Return the collectives in a program's text (`compiled.as_text()`), with loops multiplied by their trip counts."""
    computations, entry = _computations(text)
    devices = re.search(r"num_partitions=(\d+)", text)
    found, fused = [], set()
    for channel, collective in _walk(computations, entry, 1, int(devices[1]) if devices else 1, False):
        # On TPUs, what runs during fusions appears in each of them: where it begins, continues and ends.
        if channel not in fused:
            found.append(collective)
        fused |= {channel} - {None}
    return found


def total(found: list[Collective], kind: str) -> int:
    """Return the bytes of all collectives of one kind."""
    return sum(c.bytes for c in found if c.kind == kind)


def table(found: list[Collective]) -> str:
    """Format the collectives for failure messages, one per line, largest first."""
    return "\n".join(str(c) for c in sorted(found, key=lambda c: -c.bytes))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    found, entry, lines = {}, "", []
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if match := _COMPUTATION.match(line):
            lines = found[match[2]] = []
            entry = match[2] if match[1] else entry
        elif _INSTRUCTION.search(line):
            lines.append(line)
    return found, entry


def trips(line: str, computations: dict[str, list[str]]) -> int:
    """Return the trip count of a loop, from the compiler's note or from its condition (TPU), counting up from 0.

    Experts' further passes count as none: those of an even load.
    """
    if OVERFLOW in line:
        return 0
    if known := _TRIPS.search(line):
        return int(known[1])
    named = re.search(r"condition=%?([\w.\-]+)", line)
    condition = "\n".join(computations[named[1]]) if named else ""
    bounds = re.findall(r"[su]32\[\]\S* constant\((\d+)\)", condition)
    assert len(bounds) == 1 and "direction=LT" in condition, f"a loop of unknown length: {line}"
    return -(-int(bounds[0]) // _step(line, condition, computations))


def _step(line: str, condition: str, computations: dict[str, list[str]]) -> int:
    """Return the increment of a loop's counter, which is more than one where XLA unrolled it."""
    at, body = re.search(r"get-tuple-element\(.*index=(\d+)", condition), re.search(r"body=%?([\w.\-]+)", line)
    if not at or not body:
        return 1
    lines = computations[body[1]]
    made = {match[1]: made for made in lines if (match := re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", made))}
    root = next((made for made in lines if made.lstrip().startswith("ROOT")), "")
    results = re.search(r" tuple\((.*?)\)", root)
    counter = made.get(results[1].split(",")[int(at[1])].strip().lstrip("%"), "") if results else ""
    added = re.search(r" add\((.*?)\)", counter)
    steps = [re.search(r"constant\((\d+)\)", made.get(name.strip().lstrip("%"), ""))
             for name in (added[1].split(",") if added else ())]
    return next((int(step[1]) for step in steps if step), 1)


def _walk(computations: dict[str, list[str]], name: str, times: int, devices: int,
          conditional: bool, fusion: bool = False) -> Iterator[tuple[str | None, Collective]]:
    """Yield each collective; one in a fusion comes with its channel id."""
    for line in computations[name]:
        instruction = _INSTRUCTION.search(line)
        assert instruction, line  # all lines that were kept match
        result, operation = instruction.groups()
        kind = operation.removesuffix("-start")
        if kind in KINDS:
            arrays = tuple((dtype, tuple(int(n) for n in dims.split(",") if n))
                           for dtype, dims in _ARRAY.findall(result))
            if operation != kind and (result.startswith("((") or kind != "all-reduce"):
                # The start of a collective also lists its operands, and for some kinds one or two marks.
                arrays = tuple(array for array in arrays if array != ("u32", ()))
                arrays = arrays[len(arrays) // 2:]
            origin = re.search(r'op_name="([^"]*)"', line)
            channel = re.search(r"channel_id=(\d+)", line) if fusion else None
            yield channel and channel[1], Collective(kind, arrays, times, origin[1] if origin else "",
                                                     device_groups(line, devices), conditional)
        elif operation in ("while", "call", "conditional", "fusion", "async-start"):
            count = trips(line, computations) if operation == "while" else 1
            for one, several in _CALLED.findall(line):
                for called in [one] if one else [name.strip().lstrip("%") for name in several.split(",")]:
                    yield from _walk(computations, called, times * count,
                                     devices, conditional or operation == "conditional", operation == "fusion")
