"""Draw a pipeline schedule, and compute its bubble and memory.

    jaxtrain schedules --schedule=zb_h1 --stages=4 --microbatches=8
    jaxtrain schedules --all
"""

import argparse
import sys

from jaxtrain.commands.flags import add_json, command, parser_of, tell_json
from jaxtrain.errors import UserError, tell
from jaxtrain.parallel.schedules import drawing
from jaxtrain.parallel.schedules.making import NAMES, make
from jaxtrain.parallel.schedules.summaries import compared, facts, report, summary
from jaxtrain.parallel.schedules.table_files import from_file


@command()
def main(argv: list[str] | None = None) -> None:
    """Draw one schedule, or compare all."""
    flags = parse(argv)
    times = (flags.f, flags.b + (flags.f if flags.recompute else 0), flags.w)
    if flags.all:
        tell_json(*compared(times, flags.latency)) if flags.json else tell(report(times, flags.latency))
        return
    if flags.table:
        schedule = from_file(flags.table, flags.stages or 0, flags.microbatches or 0, flags.chunks or 0,
                             latency=flags.latency)
    else:
        stages, microbatches = (default if given is None else given
                                for given, default in ((flags.stages, 4), (flags.microbatches, 8)))
        chunks = flags.chunks or (2 if flags.schedule in ("interleaved", "zb_v") else 1)
        schedule = make(flags.schedule, stages, microbatches, chunks, paired=flags.paired, latency=flags.latency)
    if flags.json:
        tell_json(facts(schedule, times))
    else:  # the drawing has colours, which `tell` would write as escapes
        print(drawing.text(schedule, colour=sys.stdout.isatty()), summary(schedule, times), sep="\n\n")
    if flags.output:
        (drawing.write_png if flags.output.endswith(".png") else drawing.write_svg)(schedule, flags.output)


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
    parser.add_argument("--output", metavar="FILE",
                        help="write the drawing to this file: SVG, or PNG if it ends in .png")
    parser.add_argument("--all", action="store_true", help="compare all schedules instead")
    add_json(parser, "print the numbers as a JSON object, with --all one for each schedule and size")
    flags = parser.parse_args(argv)
    for name in "fbw":
        if not 0 < getattr(flags, name) < float("inf"):
            raise UserError(f"--{name}", f"{getattr(flags, name):g} is not a valid time", "give a number above 0")
    return flags
