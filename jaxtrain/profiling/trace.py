"""Read the operations in a trace of JAX's profiler, and divide its time among them."""

import glob
import heapq
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax

from jaxtrain.observe.ledger import HOST

GAP = "gaps"  # no operation runs: the device waits for the host, or for the start of the next kernel
# Lines of a GPU's plane that repeat its streams, added by tools that have opened the trace.
_DERIVED = ("XLA Ops", "XLA Modules", "XLA TraceMe", "Framework Ops", "Framework Name Scope", "Steps", "Source code",
            "TensorFlow Ops", "TensorFlow Name Scope")


@dataclass(frozen=True)
class Event:
    """One execution of an operation on one device, in nanoseconds since the trace began."""

    operation: str  # the name of an HLO instruction, or of a kernel where the trace has no such name; see `foreign`
    kernel: str  # the kernel that ran
    start: float
    end: float

    @property
    def what(self) -> tuple[str, str]:
        """The operation and kernel, independent of time."""
        return self.operation, self.kernel


def foreign(operation: str) -> bool:
    """Return whether an operation is of another program than the one that is looked at: "PROGRAM/OPERATION"."""
    return "/" in operation


def begin(folder: str | Path) -> None:
    """Start a trace that records what devices do, and as little as possible of the host."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    # On CPU the host is the device: its operations are recorded at level 2.
    options.host_tracer_level = 2 if jax.default_backend() == "cpu" else 1
    jax.profiler.start_trace(str(folder), profiler_options=options)


def newest(folder: str | Path) -> "jax.profiler.ProfileData":
    """Return the newest trace in a folder (`jax.profiler.ProfileData`)."""
    files = sorted(glob.glob(str(Path(folder) / "**" / "*.xplane.pb"), recursive=True), key=os.path.getmtime)
    if not files:
        raise FileNotFoundError(f"the profiler wrote no trace into {folder}")
    return jax.profiler.ProfileData.from_file(files[-1])


def events(data: Any, platform: str, program: str = "") -> list[Event]:
    """Return the operations of a trace, of its first device; on CPU of all devices together.

    Virtual CPU devices share the same cores, so only all of them together account for the time. `program`: the name of
    the one that is looked at, where the trace may have others.
    """
    found = list(events_of(data, platform, program))
    if not found:
        raise RuntimeError("the profiler recorded no operation of the device")
    return found


def events_of(data: Any, platform: str = "", program: str = "") -> Iterator[Event]:
    """Yield the operations of a trace (`jax.profiler.ProfileData`); of the host only if it is the device."""
    planes = {plane.name: plane for plane in data.planes}
    for kind in ("GPU", "TPU"):
        if devices := sorted(name for name in planes if re.fullmatch(rf"/device:{kind}:\d+.*", name)):
            first = min(devices, key=lambda name: int(re.search(r":(\d+)", name)[1]))  # pyrefly: ignore
            yield from _of_accelerator(planes[first], program)
            return
    if platform not in ("", "cpu"):
        return
    for plane in planes.values():
        for line in plane.lines:
            for event in line.events:
                if event.duration_ns > 0 and (name := (stats := dict(event.stats)).get("hlo_op")):
                    yield _event(str(name), event, stats, program)


def activities(data: Any) -> list[tuple[str, float, float]]:
    """Return what the host did in a trace, as the loop names it (`observe.ledger`): name, start and end."""
    return [(event.name.removeprefix(HOST), event.start_ns, event.start_ns + event.duration_ns)
            for plane in data.planes if plane.name.startswith("/host") for line in plane.lines for event in line.events
            if event.name.startswith(HOST)]


def gaps(found: list[Event]) -> list[tuple[float, float]]:
    """Return the times between the first start and the last end in which nothing ran."""
    idle, now = [], math.inf
    for event in sorted(found, key=lambda event: event.start):
        if event.start > now:
            idle.append((now, event.start))
        now = event.end if now == math.inf else max(now, event.end)
    return idle


def waits(idle: list[tuple[float, float]], doing: list[tuple[str, float, float]]) -> dict[str, float]:
    """Return the nanoseconds of gaps by what the host did in them, the innermost of what it did; "" for the rest."""
    found: dict[str, float] = defaultdict(float)
    for begin, end in idle:
        inside = [(name, max(a, begin), min(b, end)) for name, a, b in doing if a < end and b > begin]
        edges = sorted({begin, end, *(edge for _, *those in inside for edge in those)})
        for a, b in pairwise(edges):
            running = [(-start, name) for name, start, stop in inside if start <= a and stop >= b]
            found[min(running)[1] if running else ""] += b - a
    return dict(found)


def _of_accelerator(plane: Any, program: str) -> Iterator[Event]:
    lines = list(plane.lines)
    # A GPU has a line for each of its streams; of a TPU's lines one has the operations.
    chosen = [line for line in lines if line.name.startswith("Stream")] or [
        line for line in lines if line.name == "XLA Ops"] or [
        line for line in lines if line.name not in _DERIVED]
    for line in chosen:
        for event in line.events:
            if event.duration_ns > 0:
                name = str((stats := dict(event.stats)).get("hlo_op") or event.name).lstrip("%").partition(" = ")[0]
                yield _event(name, event, stats, program)


def _event(operation: str, event: Any, stats: dict[str, Any], program: str) -> Event:
    """Return an event whose operation carries its program's name if that is not the one looked at."""
    other = str(stats.get("hlo_module") or program)
    return Event(operation if not program or other == program else f"{other}/{operation}", event.name, event.start_ns,
                 event.start_ns + event.duration_ns)


def divide(found: list[Event], rank: Callable[[Event], int]) -> tuple[dict[Event, float], dict[Event, float], float]:
    """Assign every moment between the first start and the last end to the operations that ran then.

    If several run at once, those of the lowest `rank` share the moment equally: computation hides communication that
    runs at the same time. Returns the nanoseconds of each event, those that it ran hidden behind others, and the
    nanoseconds in which nothing ran.
    """
    own: dict[Event, float] = defaultdict(float)
    hidden: dict[Event, float] = defaultdict(float)
    idle, now = 0.0, min((event.start for event in found), default=0.0)
    running: list[tuple[float, int]] = []  # (end, index), the earliest end first
    events = sorted(found, key=lambda event: event.start)
    ranks = [rank(event) for event in events]
    active: dict[int, set[int]] = defaultdict(set)  # those that run now, by rank

    def pass_until(end: float) -> None:
        nonlocal now, idle
        if (span := end - now) <= 0:
            return
        levels = sorted(level for level, those in active.items() if those)
        if not levels:
            idle += span
        else:
            for index in (first := active[levels[0]]):
                own[events[index]] += span / len(first)
            for level in levels[1:]:
                for index in active[level]:
                    hidden[events[index]] += span / len(active[level])
        now = end

    for index, event in enumerate(events):
        while running and running[0][0] <= event.start:
            end, done = heapq.heappop(running)
            pass_until(end)
            active[ranks[done]].remove(done)
        pass_until(event.start)
        heapq.heappush(running, (event.end, index))
        active[ranks[index]].add(index)
    while running:
        end, done = heapq.heappop(running)
        pass_until(end)
        active[ranks[done]].remove(done)
    return own, hidden, idle
