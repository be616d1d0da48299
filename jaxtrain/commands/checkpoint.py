"""List, verify and compare a run's checkpoints, or restore an earlier one.

    jaxtrain checkpoint list WORKDIR
    jaxtrain checkpoint verify WORKDIR
    jaxtrain checkpoint diff WORKDIR STEP STEP
    jaxtrain checkpoint restore-to WORKDIR STEP

Exit status 0; 1: `verify` found damage; 2: a user error, reported in one line.
"""

import argparse
import dataclasses
from functools import partial

from jaxtrain.base import exit_statuses
from jaxtrain.commands.flags import Parser, add_dry_run, add_json, add_subcommand, command, parser_of, tell_json
from jaxtrain.errors import UserError, tell


@command()
def main(argv: list[str] | None) -> None:
    """Run the command; exits with status 0, 1 if `verify` found damage, or 2 on a user error."""
    flags = parser().parse_args(argv)
    from jaxtrain.checkpoint.commands import (  # imports JAX, which --help does without
        diff,
        listed,
        restore_to,
        set_aside_by,
        show,
        verified,
    )

    if flags.what == "list":
        if flags.json:
            tell_json(*listed(flags.workdir, flags.mirror).rows)
        else:
            tell(show(flags.workdir, flags.mirror))
    elif flags.what == "verify":
        right = True
        for one in verified(flags.workdir, flags.steps):
            tell_json(dataclasses.asdict(one)) if flags.json else tell(one, flush=True)
            right &= one.good
        if not right:
            raise SystemExit(exit_statuses.NO)
    elif flags.what == "diff":
        words = flags.words if len(flags.words) == 4 else [*flags.words[:2], flags.words[0], *flags.words[2:]]
        if len(words) != 4 or not (words[1] + words[3]).isdecimal():
            raise UserError("command line", f"diff {' '.join(flags.words)} does not name two checkpoints",
                            "write diff WORKDIR STEP STEP, or diff WORKDIR STEP WORKDIR2 STEP")
        for one in diff(words[0], int(words[1]), words[2], int(words[3])):
            tell_json(one.facts) if flags.json else tell(one.line, flush=True)
    elif flags.dry_run:
        newer = ", ".join(map(str, set_aside_by(flags.workdir, flags.step))) or "none"
        tell(f"the run would go on from step {flags.step}; checkpoints that would be set aside: {newer}")
    else:
        tell(restore_to(flags.workdir, flags.step, flags.mirror))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = parser_of("checkpoint", __doc__)
    commands = made.add_subparsers(dest="what", required=True, parser_class=Parser)

    add = partial(add_subcommand, commands, "checkpoint")
    lists = add("list WORKDIR", "show every checkpoint with its state, age, loss and location")
    verifies = add("verify WORKDIR", "read and verify every byte; exit status 1 if a checkpoint is damaged")
    diffs = add("diff WORKDIR STEP STEP", "show which arrays and values differ between two checkpoints")
    goes = add("restore-to WORKDIR STEP",
               "make the run resume from an earlier verified checkpoint; deletes nothing")
    for each in (lists, verifies, goes):
        each.add_argument("workdir", metavar="WORKDIR", help="the workdir of the run")
    verifies.add_argument("steps", metavar="STEP", type=int, nargs="*", help="only these; default: all")
    for each in (lists, goes):
        each.add_argument("--mirror", metavar="URL", default="",
                          help="the run's mirror, if its URL has a password: config.json does not have it")
    diffs.add_argument("words", metavar="WORKDIR STEP [WORKDIR2] STEP", nargs="+", action="store",
                       help="two checkpoints, of the same run or of two runs")
    for each in (lists, verifies, diffs):
        add_json(each)
    add_dry_run(goes, "verify the checkpoint, say what would be set aside, and stop")
    goes.add_argument("step", metavar="STEP", type=int, help="step of the checkpoint to restore")
    return made
