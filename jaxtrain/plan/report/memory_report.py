"""Say what fills the memory of a step when it runs out: the largest arrays, where they come from, what to change."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax

from jaxtrain.errors import UserError
from jaxtrain.plan import kinds, search, targets
from jaxtrain.plan.compiler import memory_of
from jaxtrain.plan.estimate import Estimate, estimate
from jaxtrain.plan.instructions import Instruction, Program, program, size
from jaxtrain.plan.report.answers_room import room_for_answers
from jaxtrain.plan.source_lines import source_lines
from jaxtrain.plan.targets import gigabytes
from jaxtrain.run import Run, identity

TOP = 8  # arrays that are listed
LESS = 0.9  # of the memory that a step is predicted to take: what a change must come below
# What makes no array of its own: views, containers, ends of what was begun. (Updates in place: see `_made`.)
_NO_ARRAY = re.compile(r"parameter|get-tuple-element|tuple|bitcast|while|conditional|call|constant|opt-barrier|"
                       r"after-all|iota|domain|[a-z\-]+-done")


def largest(text: str, count: int = TOP) -> list[tuple[float, int, Instruction, str]]:
    """Return the largest arrays that a compiled program makes on a device: bytes, how many instructions make such an
    array in one place of the model, one of them, and its line of jaxtrain.

    They may share memory where they are not needed at the same time.
    """
    code, line = program(text), source_lines(text)
    groups: dict[Any, list[tuple[float, Instruction]]] = {}
    for one in _made(code, code.entry):
        for array in one.useful if not one.opcode.endswith("-start") else one.useful[-1:]:
            place = line(one) or re.sub(r"\d+", "", code.path(one))
            groups.setdefault((array, place), []).append((size(array), one))
    rows = [(made[0][0], len(made), made[0][1], place) for (_, place), made in groups.items()]
    return sorted(rows, key=lambda row: -row[0])[:count]


def _made(code: Program, name: str) -> Iterator[Instruction]:
    """Yield the instructions of a computation and of its loops and branches that make arrays in a device's memory."""
    for one in code.computations.get(name, ()):
        if one.opcode in ("while", "conditional", "call"):
            for called in one.called:
                yield from _made(code, called)
        root = next((inner for name in one.called for inner in code.computations.get(name, ()) if inner.is_root), one)
        if not _NO_ARRAY.fullmatch(one.opcode) and root.opcode != "dynamic-update-slice" and not one.on_host:
            yield one


def report(run: Run) -> str:
    """Return what the step of a run takes of a device's memory and what would take less; nothing here uses a device."""
    lines = []
    def working(compiled: jax.stages.Compiled) -> int:
        memory = compiled.memory_analysis()
        return memory.temp_size_in_bytes if memory else 0

    made = [program for (kind, _), program in run.sharded.programs.items() if kind == "step"]
    if made:  # of all shapes of batches the one that takes most
        lines += _compiled(max(made, key=working), run)
    if not identity.has_own_parts(run):
        lines += _planned(run)
    return "\n".join(lines)


def _compiled(compiled: jax.stages.Compiled, run: Run) -> list[str]:
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None, "the compiler says nothing about its program"
    code, mesh = program(text), dict(run.mesh.shape)
    peak, _ = memory_of(compiled, run)
    kept, working = (gigabytes(size) for size in (memory.argument_size_in_bytes, memory.temp_size_in_bytes))
    lines = [f"  the step, by the compiler: {gigabytes(peak)} GB, {kept} of it state and batch, {working} for its work",
             "  the largest arrays that it makes (some share memory, since they are not needed at the same time):"]
    for bytes_, count, one, place in largest(text):
        what = f"{count} x {kinds.kind_of(one, code, mesh)}"
        lines.append(f"    {gigabytes(bytes_):>6} GB  {one.result[:40]:<40}  {what:<22}  {place}  "
                     f"{code.path(one).removeprefix('jit(step)/')[-60:]}")
    return lines


def _planned(run: Run) -> list[str]:
    config = dataclasses.replace(run.config, mesh=dataclasses.replace(run.config.mesh, auto=False, **run.mesh.shape))
    try:
        target = targets.here(list(run.mesh.devices.flat))
        guess = estimate(config, target, run.mesh.size)
    except Exception:  # an unknown device: there is nothing to say
        return []
    parts = ", ".join(f"{name} {gigabytes(part)}" for name, part in guess.worst[1].most_common(6) if part > 0)
    return [f"  the step, by the planner: {gigabytes(guess.bytes)} GB: {parts}", f"  {advice(guess)}"]


def advice(guess: Estimate) -> str:
    """Return which keys to change so that a run takes less memory than is there, and than it takes now."""
    phase, _ = guess.worst
    if phase and guess.memory.total() <= guess.target.room:
        return room_for_answers(guess)
    room = min(guess.target.room, LESS * guess.bytes)
    smaller = dataclasses.replace(guess.target, memory=room, usable=1.0)
    try:
        nearest = search.beside(guess.config, smaller, guess.devices)
    except UserError:
        nearest = None
    if nearest is None:
        return "use more devices, a smaller model or shorter rows"
    changed = {key: value for key, value in nearest.overrides.items() if _now(guess, key) != value}
    return (f"use {' '.join(f'{key}={value}' for key, value in changed.items())}, predicted to take "
            f"{gigabytes(nearest.estimate.bytes)} GB and {nearest.estimate.seconds / guess.seconds:.2f} of the time")


def _now(guess: Estimate, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(guess.config, section), name)
