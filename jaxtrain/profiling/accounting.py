"""Account for traced training steps: divide their time by kind of operation and by kernel."""

import re
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

import jax

from jaxtrain.base.annotations import JsonObject
from jaxtrain.plan import kinds
from jaxtrain.plan.instructions import CONTAINERS, Instruction, Program, program
from jaxtrain.plan.targets import Target
from jaxtrain.profiling import trace

TOP = 20  # number of kernels listed


def profile(compiled: jax.stages.Compiled, take: Callable[[], float], steps: int, mesh: Mapping[str, int],
            target: Target | None) -> JsonObject:
    """Trace `take()`, which runs `steps` steps and returns their seconds by the host's clock; return the profile."""
    with tempfile.TemporaryDirectory(prefix="jaxtrain-trace-") as folder:
        trace.begin(folder)
        try:
            seconds = take()
        finally:
            jax.profiler.stop_trace()
        found = trace.events(trace.newest(folder), jax.default_backend())
    text = compiled.as_text()
    assert text is not None, "the compiler returned no text for its program"
    return {"wall_ms": 1e3 * seconds / steps, **account(found, program(text), steps, mesh, target)}


def account(found: list[trace.Event], code: Program, steps: int, mesh: Mapping[str, int],
            target: Target | None) -> JsonObject:
    """Return the milliseconds of a step by kind, which add up to the step, and its kernels, longest first."""
    named = _instructions(found, code)
    of = {one: kinds.kind_of(instruction, code, mesh) if instruction else kinds.OTHER if trace.foreign(one[0])
          else kinds.kind_of_kernel(one[1]) for one, instruction in named.items()}
    own, hidden, idle = trace.divide(found, lambda event: kinds.rank(of[event.what]))
    scale = 1e-6 / steps
    by_kind: dict[str, float] = defaultdict(float)
    by_kernel: dict[tuple[str, str, str], list[tuple[trace.Event, float]]] = defaultdict(list)
    for event, nanoseconds in own.items():
        kind, instruction = of[event.what], named[event.what]
        by_kind[kind] += nanoseconds
        same = (kind, _place(instruction, code), instruction.result) if instruction else (kind, event.kernel, "")
        by_kernel[same].append((event, nanoseconds))
    by_kind[trace.GAP] = idle
    total = sum(by_kind.values())
    executions = _executions(list(own), code)
    kernels = [_kernel(same, runs, steps, total, named, target, executions) for same, runs in by_kernel.items()]
    behind: dict[str, float] = defaultdict(float)
    for event, nanoseconds in hidden.items():
        behind[of[event.what]] += nanoseconds
    return {
        "steps": steps, "step_ms": total * scale,
        "kinds_ms": {kind: value * scale for kind, value in _largest(by_kind)},
        "hidden_ms": {kind: value * scale for kind, value in _largest(behind) if kinds.is_sent(kind)},
        "kernels": sorted(kernels, key=lambda kernel: -kernel["ms"])[:TOP]}


def _largest(amounts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(amounts.items(), key=lambda item: -item[1])


def _instructions(found: list[trace.Event], code: Program) -> dict[tuple[str, str], Instruction | None]:
    """Return the instruction of each operation and kernel in a trace; None if it belongs to no instruction.

    If XLA launches GPU kernels as one graph, a trace contains only the graph's name as the operation. Kernels compiled
    by XLA are then found by their name: that of "loop_add_fusion.3", or of what it calls, is loop_add_fusion_3.
    """
    kernels = {re.sub(r"\W", "_", name): instruction for instruction in code.instructions.values()
               if instruction.opcode not in CONTAINERS for name in (*instruction.called, instruction.name)}

    def known(operation: str, kernel: str) -> Instruction | None:
        if trace.foreign(operation):
            return None
        instruction = code.instructions.get(operation)
        if instruction is None or (instruction.opcode in CONTAINERS and kernel != operation):
            return kernels.get(re.sub(r"\W", "_", kernel))
        return instruction

    return {what: known(*what) for what in {event.what for event in found}}


def _place(instruction: Instruction, code: Program) -> str:
    """Return where in the model an instruction comes from, without the numbers of layers."""
    return re.sub(r"\d+", "", code.path(instruction)) or instruction.opcode


def _kernel(same: tuple[str, str, str], runs: list[tuple[trace.Event, float]], steps: int, total: float,
            named: Mapping[tuple[str, str], Instruction | None], target: Target | None,
            executions: Mapping[str, int]) -> JsonObject:
    """Return one row of the kernel list: all runs with the same result shape from the same place in the model."""
    kind, path, result = same
    busiest, _ = max(runs, key=lambda run: run[1])
    own, seconds = (sum(values) for values in zip(*((ns, event.end - event.start) for event, ns in runs), strict=True))
    times = {event.operation: executions[event.operation] for event, _ in runs}
    kernel = {"name": busiest.operation if named[busiest.what] else busiest.kernel, "kind": kind, "path": path,
              "result": result, "runs": sum(times.values()) / steps, "ms": own * 1e-6 / steps, "share": own / total}
    instructions = [(instruction, times[event.operation]) for event in {event.operation: event for event, _ in
                    runs}.values() if (instruction := named[event.what])]
    if instructions and seconds and not instructions[0][0].collective:
        flops, moved = (sum(getattr(one, what) * count for one, count in instructions) for what in ("flops", "bytes"))
        kernel |= {"flops_per_s": flops / seconds * 1e9, "bytes_per_s": moved / seconds * 1e9}
        if target is not None:
            kernel["roofline"] = _least_seconds(instructions[0][0], flops, moved, target) / seconds * 1e9
    return kernel


def _executions(events: list[trace.Event], code: Program) -> dict[str, int]:
    """Count how often each operation ran: at most as often as most others of the same computation.

    One with several kernels ran as often as its most frequent kernel, unless that is launched several times for one
    operation, as in cuDNN's attention.
    """
    kernels: dict[str, Counter[str]] = defaultdict(Counter)
    for event in events:
        kernels[event.operation][event.kernel] += 1
    counts = {operation: max(those.values()) for operation, those in kernels.items()}
    of = {operation: code.instructions[operation].computation for operation in counts if operation in code.instructions}
    each: dict[str, list[int]] = defaultdict(list)
    for operation, computation in of.items():
        each[computation].append(counts[operation])
    usual = {computation: min(statistics.multimode(found)) for computation, found in each.items()}
    return {operation: min(count, usual[of[operation]]) if operation in of else count
            for operation, count in counts.items()}


def _least_seconds(instruction: Instruction, flops: float, moved: float, target: Target) -> float:
    """Return the least time that the data sheet allows: for computing or for memory, whichever is longer."""
    names = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
    dtype = "float8" if instruction.dtype.startswith("f8") else names.get(instruction.dtype, "float32")
    return max(flops / target.peak.get(dtype, target.peak["float32"]), moved / target.bandwidth)
