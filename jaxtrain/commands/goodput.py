"""Show where a run's time went across restarts, and its goodput.

    jaxtrain goodput WORKDIR

Adds up the time ledgers of all starts of the run.
"""

import time

from jaxtrain.commands.flags import add_json, command, parser_of, tell_json
from jaxtrain.errors import UserError, tell
from jaxtrain.observe.goodput import account, duration, incarnations, table


@command()
def main(argv: list[str] | None = None) -> None:
    """Print the table of a workdir, as of the run's last sign of life."""
    parser = parser_of("goodput", __doc__)
    parser.add_argument("workdir", metavar="WORKDIR", help="the workdir of the run")
    add_json(parser, "print the account as a JSON object")
    flags = parser.parse_args(argv)
    workdir = flags.workdir
    found = incarnations(workdir)
    if not found:
        raise UserError("WORKDIR", f"{workdir} has no ledger", "give the workdir of a run that has begun")
    life = account(found)
    if flags.json:
        tell_json({"seconds": life.seconds, "starts": len(found), "failures": life.failures, "goodput": life.goodput,
                   "ettr": life.ettr, "step": life.step, "last_step": found[-1].last_step, "seconds_left": life.left,
                   "ended": found[-1].ended, "last_sign": found[-1].sign})
        return
    tell(table(life))
    if not found[-1].ended:
        tell(f"last sign of life {duration(max(0.0, time.time() - found[-1].sign))} ago: it runs, or it was killed")
