"""Rank meshes for given hardware: which fit, how fast they train, what they cost.

    jaxtrain plan --config=configs/llama3_8b.py --target=h100x8
    jaxtrain plan --config=configs/gpt.py:tiny --target=h100x8 --config.mesh.data=2 --config.mesh.fsdp=4 --explain
    jaxtrain plan --config=configs/gpt.py:124m --target=h100x8 --tokens=3e9 --scaling=FILE --dollars=1000

Exit status 0; 1: nothing fits; 2: a user error, reported in one line.
"""

import argparse
import sys

from jaxtrain.config.schema import PRECISIONS
from jaxtrain.flags import command, overrides_of, parser_of
from jaxtrain.plan import targets


@command()
def main(argv: list[str] | None) -> None:
    """Run the command; exit status 0; 1: nothing fits; 2: a user error, reported in one line."""
    flags, words = parser().parse_known_args(argv)
    from jaxtrain.plan.plan_command import run  # imports JAX, for which --help does not wait

    run(flags, overrides_of(words, vars(flags)))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = parser_of("plan", __doc__)
    made.add_argument("--config", required=True, help="FILE[:variant]; --config.SECTION.KEY=VALUE changes a key of it")
    made.add_argument("--target", help=f"one of {', '.join(targets.TARGETS)}, times devices: h100x256; default: here")
    made.add_argument("--targets", help="a JSON file with your own accelerators, or with measurements")
    made.add_argument("--global_batch", type=int, help="samples per step; default: the config's")
    made.add_argument("--seq_len", type=int, help="tokens per sample; default: the config's")
    made.add_argument("--tokens", type=float, default=1e12,
                      help="tokens to train on, for days and cost; default: 1e12")
    made.add_argument("--precisions", default="", metavar="NAME,...",
                      help=f"also rank these precisions, in addition to the config's own: {', '.join(PRECISIONS)}")
    made.add_argument("--top", type=int, default=10, help="number of layouts to show; default: 10")
    made.add_argument("--html", metavar="FILE", help="also write the ranking as a page with charts of memory and time")
    made.add_argument("--scaling", metavar="FILE",
                      help="also predict the loss of the run from the fit that jaxtrain scaling --save wrote")
    made.add_argument("--flops", type=float,
                      help="with --scaling: a FLOP budget, and the best loss within it; default: the run's")
    made.add_argument("--dollars", type=float,
                      help="with --scaling: the same for a budget in dollars, at the first layout's speed")
    made.add_argument("--link", type=float, metavar="GBIT",
                      help="with islands.count: gigabits a second between islands, to say which mode is fastest")
    made.add_argument("--slowest", type=float, default=1, metavar="TIMES",
                      help="with --link: step time of the slowest island, relative to the others; default: 1")
    made.add_argument("--explain", action="store_true", help="explain only the layout of the config")
    made.add_argument("--verify", type=int, default=0, metavar="K", help="compile the best K for the real target")
    made.add_argument("--roofline", action="store_true",
                      help="with --verify: the time of each compiled operation, exposed communication and MFU")
    made.add_argument("--timeline", metavar="FILE", help="with --verify: draw the compiled step's timeline, as SVG")
    return made


if __name__ == "__main__":
    sys.exit(main())
