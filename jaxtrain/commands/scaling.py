"""Fit a scaling law to finished runs: predict the loss, and the best size for a budget.

    jaxtrain scaling WORKDIR WORKDIR WORKDIR ... --output=FILE
    jaxtrain scaling SWEEP --flops=1e21 --output=PAGE.html
    jaxtrain plan --config=configs/gpt.py:124m --target=h100x8 --tokens=3e9 --scaling=FILE

The loss is E + A / N^alpha + B / D^beta, where N is the number of parameters used per token and D the number of tokens
a run was trained on, so that training takes 6 N D FLOPs, plus those of attention. Bands are the 5th and 95th
percentiles of fits to bootstrap samples of the runs. The runs need at least three sizes and three numbers of tokens.

Exit status 0; 2: a user error, reported in one line.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from jaxtrain.commands.flags import add_json, command, parser_of, tell_json
from jaxtrain.errors import UserError
from jaxtrain.plan.scaling_laws.fit_report import page, table


@command()
def main(argv: list[str] | None) -> None:
    """Fit, print, and save what was asked for."""
    flags = parser().parse_args(argv)
    for path in map(Path, flags.output):
        if not path.absolute().parent.is_dir():
            raise UserError("--output", f"there is no folder {path.parent}", "make it first")
    if not 2 <= flags.samples <= 10_000:
        raise UserError("--samples", f"{flags.samples} is not a number of samples", "give 2 to 10000, such as 200")
    from jaxtrain.plan.scaling_laws import saved_fit  # imports SciPy, for which --help does not wait
    from jaxtrain.plan.scaling_laws.finished_runs import points
    from jaxtrain.plan.scaling_laws.parametric_loss import fit

    asked = saved_fit.budget(flags.flops, None)
    found = fit(points(flags.runs, flags.metric), flags.samples, flags.seed)
    most = max(6 * point.parameters * point.tokens for point in found.points)
    budgets = [asked] if asked else [most, 10 * most, 100 * most]
    if flags.json:
        tell_json({"law": asdict(found.law), "runs": [asdict(point) for point in found.points],
                   "best": [dict(zip(("parameters", "tokens"), found.law.optimum(flops), strict=True), flops=flops)
                            for flops in budgets]})
    else:
        print(table(found, budgets))
    for path in map(Path, flags.output):
        if path.suffix == ".html":
            path.write_text(page(found, budgets))
        else:
            saved_fit.save(found, path, flags.metric)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = parser_of("scaling", __doc__)
    made.add_argument("runs", nargs="+", metavar="WORKDIR", action="store",
                      help="workdirs of runs, and folders of sweeps or their results.jsonl")
    made.add_argument("--metric", default="eval_loss", help="key of the loss in metrics.jsonl; default: eval_loss")
    made.add_argument("--samples", type=int, default=200, help="bootstrap samples for the bands; default: 200")
    made.add_argument("--seed", type=int, default=0, help="seed of the bootstrap; default: 0")
    made.add_argument("--flops", type=float, help="compute budget: show the best model size for it")
    add_json(made, "print the law, the runs and the best sizes as a JSON object")
    made.add_argument("--output", nargs="+", default=[], metavar="FILE",
                      help="write the fit, for jaxtrain plan --scaling=FILE; a file that ends in .html is a page with "
                           "charts of the runs, the fit and the best sizes")
    return made
