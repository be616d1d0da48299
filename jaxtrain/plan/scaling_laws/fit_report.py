"""A fitted scaling law beside its runs, as text and as a page."""

from html import escape


def table(found, budgets: list[float]) -> str:
    """Return the runs beside the fit, its constants, and the best sizes for some budgets, as text."""
    from jaxtrain.plan.scaling_laws.saved_fit import at_best, described, short, vague

    law = found.law
    lines = [f"{'parameters':>12}{'tokens':>9}{'loss':>9}{'fit':>9}   run"]
    lines += [f"{short(p.parameters):>12}{short(p.tokens):>9}{p.loss:>9.4f}{law.loss(p.parameters, p.tokens):>9.4f}"
              f"   {p.name}" for p in sorted(found.points, key=lambda p: (p.parameters, p.tokens))]
    lines += ["", f"loss = E + A / N^alpha + B / D^beta, of {len(found.points)} runs:", *described(found), *vague(law),
              "", "the best that a budget gets:"]
    lines += [f"  {flops:.3g} FLOPs: {at_best(found, flops)}" for flops in budgets]
    return "\n".join(lines)


def page(found, budgets: list[float]) -> str:
    """Return the runs and the fit over the tokens, and the best size over the budget, as a page."""
    import numpy as np

    from jaxtrain.plan.report.log_log import log_log, page_of

    law, charts = found.law, []
    for size in sorted({point.parameters for point in found.points}):
        runs = sorted((p.tokens, p.loss) for p in found.points if p.parameters == size)
        across = np.geomspace(runs[0][0], runs[-1][0] * 2, 20)
        charts.append(log_log(f"loss of {size:,.0f} parameters", "tokens", {
            "runs": runs, "fit": [(float(d), law.loss(size, float(d))) for d in across]}, joined=False))
    spent = [6 * point.parameters * point.tokens for point in found.points]
    flops = [float(c) for c in np.geomspace(min(spent), max(*budgets, *spent), 12)]
    charts.append(log_log("best number of parameters", "FLOPs", {
        "runs": [(6 * p.parameters * p.tokens, p.parameters) for p in found.points],
        "best": [(c, law.optimum(c)[0]) for c in flops]}, joined=False))
    return page_of("Scaling law", charts, f"<pre>{escape(table(found, budgets))}</pre>")
