"""Check this machine for problems that make training fail or slow it down.

    jaxtrain doctor
    jaxtrain doctor --workdir=DIR --json

Prints one line per finding, with its fix. Exit status 0: training would work; 1: a check FAILs; 2: the command line
is wrong.
"""

import os
import sys
from collections import Counter
from dataclasses import asdict

from jaxtrain.base import exit_statuses
from jaxtrain.commands.flags import Parser, add_json, command, parser_of, tell_json
from jaxtrain.doctor import (
    network,
)
from jaxtrain.doctor.checks import findings
from jaxtrain.errors import UserError, tell


def parser() -> Parser:
    """Return the parser of the command line."""
    made = parser_of("doctor", __doc__)
    made.add_argument("--workdir", default=".", help="folder whose file system to check; default: the current one")
    made.add_argument("--coordinator", help="host:port of process 0, for runs of several processes; default: "
                                                     "JAX_COORDINATOR_ADDRESS")
    add_json(made, "print one JSON object per finding: level, check, what, fix")
    return made


def main(argv: list[str] | None = None) -> int:
    """Print the findings; return the exit status."""
    counts: Counter[str] = Counter()

    @command()
    def examined(argv: list[str] | None) -> None:
        flags = parser().parse_args(argv)
        if "://" in flags.workdir:
            raise UserError("--workdir", "a workdir is a folder", "give one; a URL can be --config.checkpoint.mirror")
        coordinator = flags.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
        if coordinator:
            network.split(coordinator)
        for finding in findings(flags.workdir, coordinator):
            counts[finding.level] += 1
            tell_json(asdict(finding)) if flags.json else tell(finding, flush=True)
        if not flags.json:
            tell(", ".join(f"{counts[level]} {level}" for level in ("ok", "note", "warn", "FAIL")))

    try:
        return examined(argv) or (exit_statuses.NO if counts["FAIL"] else exit_statuses.DONE)
    except BrokenPipeError:  # the reader of a pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_statuses.NO
