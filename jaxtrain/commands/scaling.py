"""Fit a scaling law to finished runs: predict the loss, and the best size for a budget.

    jaxtrain scaling WORKDIR WORKDIR WORKDIR ... --save=FILE
    jaxtrain scaling SWEEP --flops=1e21 --output=FILE
    jaxtrain plan --config=configs/gpt.py:124m --target=h100x8 --tokens=3e9 --scaling=FILE

The loss is E + A / N^alpha + B / D^beta, where N is the number of parameters used per token and D the number of tokens
a run was trained on, so that training takes 6 N D FLOPs, plus those of attention. Bands are the 5th and 95th
percentiles of fits to bootstrap samples of the runs. The runs need at least three sizes and three numbers of tokens.

Exit status 0; 2: a user error, reported in one line.
"""

import argparse
from pathlib import Path

from jaxtrain.commands.flags import command, parser_of
from jaxtrain.errors import UserError
from jaxtrain.plan.scaling_laws.fit_report import page, table


@command()
def main(argv: list[str] | None) -> None:
    """Fit, print, and save what was asked for."""
    flags = parser().parse_args(argv)
    for name in ("save", "output"):
        if (path := getattr(flags, name)) and not Path(path).absolute().parent.is_dir():
            raise UserError(f"--{name}", f"there is no folder {Path(path).parent}", "make it first")
    if not 2 <= flags.samples <= 10_000:
        raise UserError("--samples", f"{flags.samples} is not a number of samples", "give 2 to 10000, such as 200")
    from jaxtrain.plan.scaling_laws import saved_fit  # imports SciPy, for which --help does not wait
    from jaxtrain.plan.scaling_laws.finished_runs import points
    from jaxtrain.plan.scaling_laws.parametric_loss import fit

    asked = saved_fit.budget(flags.flops, None)
    found = fit(points(flags.runs, flags.metric), flags.samples, flags.seed)
    most = max(6 * point.parameters * point.tokens for point in found.points)
    budgets = [asked] if asked else [most, 10 * most, 100 * most]
    print(table(found, budgets))
    if flags.save:
        saved_fit.save(found, flags.save, flags.metric)
    if flags.output:
        Path(flags.output).write_text(page(found, budgets))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = parser_of("scaling", __doc__)
    made.add_argument("runs", nargs="+", metavar="RUNS", action="store",
                      help="workdirs of runs, and folders of sweeps or their results.jsonl")
    made.add_argument("--metric", default="eval_loss", help="key of the loss in metrics.jsonl; default: eval_loss")
    made.add_argument("--samples", type=int, default=200, help="bootstrap samples for the bands; default: 200")
    made.add_argument("--seed", type=int, default=0, help="seed of the bootstrap; default: 0")
    made.add_argument("--flops", type=float, help="compute budget: show the best model size for it")
    made.add_argument("--save", metavar="FILE", help="write the fit, for jaxtrain plan --scaling=FILE")
    made.add_argument("--output", metavar="FILE", help="draw the runs, the fit and the best sizes, as a page")
    return made
