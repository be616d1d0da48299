"""Draw a pipeline schedule, and compute its bubble and memory.

    jaxtrain schedules --schedule=zb_h1 --stages=4 --microbatches=8
    jaxtrain schedules --report
"""

import argparse
import sys

from jaxtrain.errors import UserError
from jaxtrain.commands.flags import parser_of
from jaxtrain.parallel.schedules import drawing
from jaxtrain.parallel.schedules.making import NAMES, make
from jaxtrain.parallel.schedules.schedule import Schedule
from jaxtrain.parallel.schedules.slots import table
from jaxtrain.parallel.schedules.table_files import from_file
from jaxtrain.parallel.schedules.times import efficiency, free_running_time, ideal_time, modelled_time

Times = tuple[float, float, float]


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns exit status 0, or 2 on a user error."""
    try:
        flags = parse(argv)
        times = (flags.f, flags.b + (flags.f if flags.recompute else 0), flags.w)
        if flags.report:
            print(report(times, flags.latency))
            return 0
        if flags.table:
            schedule = from_file(flags.table, flags.stages or 0, flags.microbatches or 0, flags.chunks or 0,
                                 latency=flags.latency)
        else:
            stages, microbatches = (default if given is None else given
                                    for given, default in ((flags.stages, 4), (flags.microbatches, 8)))
            chunks = flags.chunks or (2 if flags.schedule in ("interleaved", "zb_v") else 1)
            schedule = make(flags.schedule, stages, microbatches, chunks, paired=flags.paired, latency=flags.latency)
        print(drawing.text(schedule, colour=sys.stdout.isatty()), summary(schedule, times), sep="\n\n")
        for path, write in ((flags.output, drawing.write_svg), (flags.png, drawing.write_png)):
            if path:
                write(schedule, path)
        return 0
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        return 2


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of("schedules", __doc__)
    parser.add_argument("--schedule", default="1f1b", help=f"{', '.join(NAMES)}; default: 1f1b")
    parser.add_argument("--stages", type=int, help="number of stages; default 4, or as in the table")
    parser.add_argument("--microbatches", type=int, help="number of micro-batches; default 8, or as in the table")
    parser.add_argument("--chunks", type=int, help="chunks per stage; default 2 for interleaved and zb_v, else 1")
    parser.add_argument("--paired", action="store_true", help="allow one F and one B per stage in the same tick")
    parser.add_argument("--latency", type=int, default=1,
                        help="2: each transfer takes a tick, and overlaps with computation; default 1")
    parser.add_argument("--table", help="a schedule of your own, in CSV or JSON")
    parser.add_argument("--f", type=float, default=1, help="time of a stage's forward pass")
    parser.add_argument("--b", type=float, default=1, help="time of a stage's backward pass for inputs")
    parser.add_argument("--w", type=float, default=1, help="time of a stage's backward pass for weights")
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True,
                        help="B includes recomputing the forward pass, and so takes longer by F (default)")
    parser.add_argument("--output", metavar="FILE", help="write the drawing to this SVG file")
    parser.add_argument("--png", help="write the drawing to this PNG file, with matplotlib")
    parser.add_argument("--report", action="store_true", help="compare all schedules instead")
    flags = parser.parse_args(argv)
    for name in "fbw":
        if not 0 < getattr(flags, name) < float("inf"):
            raise UserError(f"--{name}", f"{getattr(flags, name):g} is not a valid time", "give a number above 0")
    return flags


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


def report(times: Times, latency: int) -> str:
    """Return a table of how busy a stage is under each schedule."""
    sizes = [(p, m) for p in (4, 8) for m in (8, 32)]
    kinds = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2)]
    lines = ["share of time in which a stage works, in lockstep (and free-running), modelled with "
             "F {:g}, B {:g}, W {:g}; B takes both where there is no W".format(*times), "",
             f"{'':<22}" + "".join(f"p={p} m={m}".rjust(17) for p, m in sizes)]
    for name, chunks in kinds:
        for paired in (False, True)[:1 if name.startswith("zb_") else 2]:
            made = [make(name, p, m, chunks, paired=paired, latency=latency) for p, m in sizes]
            label = name + (f" x{chunks}" if chunks > 1 else "") + (", paired" if paired else "")
            lines.append(f"{label:<22}" + "".join(
                f"{efficiency(one, *times):.1%} ({_free(one, times):.1%})".rjust(17) for one in made))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
