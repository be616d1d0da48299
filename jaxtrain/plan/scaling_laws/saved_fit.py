"""A fitted scaling law as a file, and in words: what loss a run should reach, and what a budget gets at best."""

import math
from dataclasses import asdict
from pathlib import Path

from jaxtrain.errors import UserError
from jaxtrain.files import atomic_files
from jaxtrain.files.bounded_files import user_json
from jaxtrain.plan.scaling_laws.parametric_loss import Fit, Law, Point

STEEP = 1.0  # an exponent above this is that of no law: twice the size would more than halve what is left of the loss
_NUMBER = int | float
_LAW = dict.fromkeys(("E", "A", "B", "alpha", "beta"), _NUMBER)
_FORM = {"law": _LAW, "samples": [_LAW], "lost": int,
         "runs": [{"parameters": _NUMBER, "tokens": _NUMBER, "loss": _NUMBER, "name": str}]}


def save(fit: Fit, path: str | Path, metric: str) -> None:
    """Write a fit, whole or not at all."""
    atomic_files.write_json(Path(path), {
        "metric": metric, "law": asdict(fit.law), "runs": list(map(asdict, fit.points)),
        "samples": list(map(asdict, fit.samples)), "lost": fit.lost})


def load(path: str | Path) -> Fit:
    """Return the fit that a file holds."""
    fix = "give the file that jaxtrain scaling --output wrote"
    found = user_json(path, _FORM, "--scaling", fix)
    if found is None or not found["runs"]:
        raise UserError("--scaling", f"{path} {'is not there' if found is None else 'has no runs'}", fix)
    if not all(run["parameters"] > 0 and run["tokens"] > 0 for run in found["runs"]) or not all(
            math.isfinite(one) for one in found["law"].values()):
        raise UserError("--scaling", f"{path} has numbers that no fit has", fix)
    return Fit(Law(**found["law"]), [Law(**one) for one in found["samples"]],
               [Point(**one) for one in found["runs"]], found["lost"])


def predicted(fit: Fit, parameters: float, tokens: float) -> str:
    """Return the loss of a model of this many parameters after this many tokens, with its band, in words."""
    low, high = fit.band(lambda law: law.loss(parameters, tokens))
    far = fit.beyond(parameters, tokens)
    warning = f", {far:,.0f} times as much as in any run of the fit" if far >= 1.5 else ""
    return (f"{fit.law.loss(parameters, tokens):.4f} ({low:.4f} to {high:.4f}) with {short(parameters)} parameters and "
            f"{short(tokens)} tokens{warning}")


def at_best(fit: Fit, flops: float) -> str:
    """Return what so many FLOPs get at best, in words."""
    parameters, tokens = fit.law.optimum(flops)
    if not parameters > 0:
        return "not known: by this fit more parameters or more tokens do not help"
    low, high = fit.band(lambda law: law.optimum(flops)[0])
    return f"{predicted(fit, parameters, tokens)}; {short(low)} to {short(high)} parameters"


def short(number: float) -> str:
    """Format a number of parameters or tokens: 1.23B."""
    if not math.isfinite(number):
        return f"{number}"
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{name}"
    return f"{number:.3g}"


def described(fit: Fit) -> list[str]:
    """Return the constants with their bands, as lines."""
    lines = []
    for name, value in asdict(fit.law).items():
        low, high = fit.band(lambda law, name=name: getattr(law, name))
        lines.append(f"  {name:<7}{value:>12.5g}   {low:.5g} to {high:.5g}")
    return lines + [f"no law fits {fit.lost} of {fit.lost + len(fit.samples)} samples of the runs, so bands are wider"
                    ] * bool(fit.lost)


def vague(law: Law) -> list[str]:
    """Return a warning, as lines, where the constants say that the runs do not determine them."""
    steep = [f"{name}={value:.3g}" for name, value in (("alpha", law.alpha), ("beta", law.beta)) if value > STEEP]
    return [f"warning: {' and '.join(steep)}: so steep a law means that these runs do not determine it; give it more "
            "runs, larger and longer ones, each with a good learning rate"] if steep else []


def budget(flops: float | None, dollars: float | None, flops_for_a_dollar: float = 0.0) -> float | None:
    """Return the FLOPs that --flops or --dollars of a command ask about; None: neither was given."""
    for name, value in (("flops", flops), ("dollars", dollars)):
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name}", f"{value} is not a budget", "give a number above 0, such as 1e21")
    if flops is not None and dollars is not None:
        raise UserError("--dollars", "--flops is a budget already", "leave one of them out")
    return flops if dollars is None else dollars * flops_for_a_dollar
