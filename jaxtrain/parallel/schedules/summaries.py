"""A schedule's length, bubble and memory as text, and a table that compares all schedules."""

from collections.abc import Iterator

from jaxtrain.base.annotations import JsonObject
from jaxtrain.parallel.schedules.making import make
from jaxtrain.parallel.schedules.schedule import Schedule
from jaxtrain.parallel.schedules.slots import table
from jaxtrain.parallel.schedules.times import efficiency, free_running_time, ideal_time, modelled_time

Times = tuple[float, float, float]
_SIZES = [(p, m) for p in (4, 8) for m in (8, 32)]  # stages and micro-batches that `report` compares
_KINDS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2)]  # with their chunks


def facts(schedule: Schedule, times: Times) -> JsonObject:
    """Return length, bubble, memory and times, as scripts read them; lists have a number for each stage."""
    stages, slots = range(schedule.stages), table(schedule)
    return {"schedule": schedule.name, "stages": schedule.stages, "microbatches": schedule.microbatches,
            "chunks": schedule.chunks, "latency": schedule.latency, "ticks": schedule.length,
            "bubble": schedule.bubble_fraction, "idle": [*map(schedule.idle, stages)],
            "idle_in_use": [*map(schedule.bubble, stages)], "inputs_held": [*map(schedule.in_flight, stages)],
            "activations": slots.activations, "gradients": slots.gradients, "waiting_for_w": slots.weight_slots,
            **_busy(schedule, times), "time": modelled_time(schedule, *times), "ideal": ideal_time(schedule, *times)}


def _busy(schedule: Schedule, times: Times) -> dict[str, float]:
    """Return the share of time in which a stage works: in lockstep, and with each stage as fast as it can."""
    return {"busy": efficiency(schedule, *times), "busy_free_running": _free(schedule, times)}


def summary(schedule: Schedule, times: Times) -> str:
    """Return length, bubble, memory and times, one line each."""
    stages, slots = range(schedule.stages), table(schedule)

    def each(count) -> str:
        return " ".join(str(count(stage)) for stage in stages)

    lines = [
        ("schedule", f"{schedule.name}, {schedule.stages} stages, {schedule.microbatches} micro-batches, "
                     f"{schedule.chunks} chunk{'s' * (schedule.chunks > 1)} per stage, latency {schedule.latency}"),
        ("ticks", f"{schedule.length}, {schedule.bubble_fraction:.1%} empty"),
        ("idle ticks", f"{each(schedule.idle)} by stage; {each(schedule.bubble)} while in use"),
        ("inputs held", f"{each(schedule.in_flight)} by stage until B"
                        + (f"; {each(lambda stage: schedule.in_flight(stage, until='W'))} until W"
                           if "W" in schedule.kinds else "")),
        ("slots", f"{slots.activations} activations, {slots.gradients} gradients, {slots.weight_slots} waiting for W"),
        ("modelled", "F {:g}, B {:g}, W {:g}: ".format(*times)
                     + f"{efficiency(schedule, *times):.1%} busy in lockstep, {_free(schedule, times):.1%} without; "
                       f"time {modelled_time(schedule, *times):g}, ideal {ideal_time(schedule, *times):g}"),
    ]
    return "\n".join(f"{name:<12}{value}" for name, value in lines)


def _free(schedule: Schedule, times: Times) -> float:
    return ideal_time(schedule, *times) / free_running_time(schedule, *times)


def compared(times: Times, latency: int) -> Iterator[JsonObject]:
    """Yield how busy a stage is under each schedule, of each of several sizes."""
    for name, chunks in _KINDS:
        for paired in (False, True)[:1 if name.startswith("zb_") else 2]:
            for p, m in _SIZES:
                made = make(name, p, m, chunks, paired=paired, latency=latency)
                yield {"schedule": name, "chunks": chunks, "paired": paired, "stages": p, "microbatches": m,
                       **_busy(made, times)}


def report(times: Times, latency: int) -> str:
    """Return a table of how busy a stage is under each schedule."""
    lines = ["share of time in which a stage works, in lockstep (and free-running), modelled with "
             "F {:g}, B {:g}, W {:g}; B takes both where there is no W".format(*times), "",
             f"{'':<22}" + "".join(f"p={p} m={m}".rjust(17) for p, m in _SIZES)]
    rows: dict[str, str] = {}
    for one in compared(times, latency):
        label = one["schedule"] + (f" x{one['chunks']}" if one["chunks"] > 1 else "") + ", paired" * one["paired"]
        rows[label] = rows.get(label, "") + f"{one['busy']:.1%} ({one['busy_free_running']:.1%})".rjust(17)
    lines += [f"{label:<22}{cells}" for label, cells in rows.items()]
    return "\n".join(lines)
