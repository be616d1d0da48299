"""Rank meshes for given hardware by speed, with their memory and cost.

    jaxtrain plan --config=configs/llama3_8b.py --target=h100x8
    jaxtrain plan --config=configs/gpt.py:tiny --target=h100x8 --config.mesh.data=2 --config.mesh.fsdp=4 --explain
    jaxtrain plan --config=configs/gpt.py:124m --target=h100x8 --tokens=3e9 --scaling=FILE --dollars=1000

Exit status 0; 1: nothing fits; 2: a user error, reported in one line.
"""

import argparse
import sys

from jaxtrain.config.schema import PRECISIONS
from jaxtrain.commands.flags import add_config, command, need_config, overrides_of, parser_of
from jaxtrain.plan import targets


@command()
def main(argv: list[str] | None) -> None:
    """Run the command; exit status 0; 1: nothing fits; 2: a user error, reported in one line."""
    flags, words = parser().parse_known_args(argv)
    overrides = overrides_of(words, vars(flags))
    need_config(flags)
    from jaxtrain.plan.plan_command import run  # imports JAX, for which --help does not wait

    run(flags, overrides)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = parser_of("plan", __doc__)
    add_config(made)
    made.add_argument("--target",
                      help=f"type and number of devices, such as h100x256, of {', '.join(targets.TARGETS)}; "
                           f"default: this machine's devices")
    made.add_argument("--targets", help="a JSON file with your own accelerators, or with measurements")
    made.add_argument("--global_batch", type=int, help="global batch size in sequences; default: the config's")
    made.add_argument("--seq_len", type=int, help="sequence length in tokens; default: the config's")
    made.add_argument("--tokens", type=float, default=1e12,
                      help="tokens to train on, to compute days and cost; default: 1e12")
    made.add_argument("--precisions", default="", metavar="NAME,...",
                      help=f"also rank these precisions, in addition to the config's: {', '.join(PRECISIONS)}")
    made.add_argument("--top", type=int, default=10, help="number of layouts to show; default: 10")
    made.add_argument("--output", metavar="FILE",
                      help="also write the ranking as a page with charts of memory and time")
    made.add_argument("--scaling", metavar="FILE",
                      help="also predict the run's loss, from the fit that jaxtrain scaling --save wrote")
    made.add_argument("--flops", type=float,
                      help="with --scaling: show the best model for this compute budget; default: the run's")
    made.add_argument("--dollars", type=float,
                      help="with --scaling: the same for a budget in dollars, at the first layout's speed")
    made.add_argument("--link", type=float, metavar="GBIT",
                      help="with islands.count: gigabits per second between islands, to show which mode is fastest")
    made.add_argument("--slowest", type=float, default=1, metavar="TIMES",
                      help="with --link: how many times slower than the others the slowest island is; default: 1")
    made.add_argument("--explain", action="store_true", help="explain the config's own layout only")
    made.add_argument("--verify", type=int, default=0, metavar="K",
                      help="compile the best K layouts for the real target")
    made.add_argument("--roofline", action="store_true",
                      help="with --verify: the time of each compiled operation, exposed communication and MFU")
    made.add_argument("--timeline", metavar="FILE", help="with --verify: draw the compiled step's timeline, as SVG")
    made.group("what is planned", "target", "targets", "global_batch", "seq_len", "precisions", "link", "slowest")
    made.group("budgets and scaling laws", "tokens", "scaling", "flops", "dollars")
    made.group("what is shown", "top", "output", "explain")
    made.group("compiling for the real target", "verify", "roofline", "timeline")
    return made


if __name__ == "__main__":
    sys.exit(main())
