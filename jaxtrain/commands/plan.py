"""Rank meshes for given hardware by speed, with their memory and cost.

    jaxtrain plan --config=configs/llama3_8b.py --target=h100x8
    jaxtrain plan --config=configs/gpt.py:tiny --target=h100x8 --config.mesh.data=2 --config.mesh.fsdp=4 --explain
    jaxtrain plan --config=configs/gpt.py:124m --target=h100x8 --tokens=3e9 --scaling=FILE --dollars=1000

Exit status 0; 1: nothing fits; 2: a user error, reported in one line.
"""

import argparse
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxtrain.base import exit_statuses
from jaxtrain.commands.flags import add_config, add_json, command, need_config, overrides_of, parser_of, tell_json
from jaxtrain.config.schema import PRECISIONS
from jaxtrain.errors import UserError, nearest, tell
from jaxtrain.files.work_progress import Work
from jaxtrain.plan import targets

if TYPE_CHECKING:
    from jaxtrain.config.schema import Config


@command()
def main(argv: list[str] | None) -> None:
    """Run the command; exit status 0; 1: nothing fits; 2: a user error, reported in one line."""
    flags, words = parser().parse_known_args(argv)
    overrides = overrides_of(words, vars(flags))
    need_config(flags)
    run(flags, overrides)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = parser_of("plan", __doc__)
    add_config(made)
    made.add_argument("--target",
                      help=f"type and number of devices, such as h100x256, of {', '.join(targets.TARGETS)}; "
                           f"default: this machine's devices")
    made.add_argument("--targets", help="a JSON file with your own accelerators, or with measurements")
    made.add_argument("--global_batch_size", type=int, help="global batch size in sequences; default: the config's")
    made.add_argument("--seq_len", type=int, help="sequence length in tokens; default: the config's")
    made.add_argument("--documents", type=int, default=1,
                      help="with --explain: documents of equal length in a row, whose pairs kernels skip; default: 1")
    made.add_argument("--tokens", type=float, default=1e12,
                      help="tokens to train on, to compute days and cost; default: 1e12")
    made.add_argument("--precisions", default="", metavar="NAME,...",
                      help=f"also rank these precisions, in addition to the config's: {', '.join(PRECISIONS)}")
    made.add_argument("--top", type=int, default=10, help="number of layouts to show; default: 10")
    made.add_argument("--output", metavar="FILE",
                      help="also write the ranking as a page with charts of memory and time")
    made.add_argument("--scaling", metavar="FILE",
                      help="also predict the run's loss, from the fit that jaxtrain scaling --output wrote")
    made.add_argument("--flops", type=float,
                      help="with --scaling: show the best model for this compute budget; default: the run's")
    made.add_argument("--dollars", type=float,
                      help="with --scaling: the same for a budget in dollars, at the first layout's speed")
    made.add_argument("--link", type=float, metavar="GBIT",
                      help="with diloco.count: gigabits per second between islands, to show which mode is fastest")
    made.add_argument("--slowest", type=float, default=1, metavar="TIMES",
                      help="with --link: how many times slower than the others the slowest island is; default: 1")
    add_json(made, "print a JSON object for each layout, the fastest first")
    made.add_argument("--explain", action="store_true", help="explain the config's own layout only")
    made.add_argument("--verify", type=int, default=0, metavar="K",
                      help="compile the best K layouts for the real target")
    made.add_argument("--roofline", action="store_true",
                      help="with --verify: the time of each compiled operation, exposed communication and MFU")
    made.add_argument("--timeline", metavar="FILE", help="with --verify: draw the compiled step's timeline, as SVG")
    made.group("what is planned", "target", "targets", "global_batch_size", "seq_len", "documents", "precisions",
               "link", "slowest")
    made.group("budgets and scaling laws", "tokens", "scaling", "flops", "dollars")
    made.group("what is shown", "top", "output", "json", "explain")
    made.group("compiling for the real target", "verify", "roofline", "timeline")
    return made


def run(flags: argparse.Namespace, overrides: dict[str, str]) -> None:
    """Do what the flags ask for; raises `SystemExit` with status 1 if nothing fits."""
    from jaxtrain.config.hybrid_mesh import with_hybrid_mesh  # these import JAX, for which --help does not wait
    from jaxtrain.plan.estimate import estimate
    from jaxtrain.plan.layout_facts import between_islands, reached, verified
    from jaxtrain.plan.report import html
    from jaxtrain.plan.report.table import explained, figures_of, table
    from jaxtrain.plan.search import fastest_mesh, search

    config = _config_of(flags, overrides)
    target, devices = _place(flags)
    if config.mesh.hsdp and not flags.explain:
        raise UserError("mesh.hsdp", "without --explain the planner compares many meshes, and mesh=hsdp is one",
                        "add --explain, or leave out mesh=hsdp")
    config = with_hybrid_mesh(config, devices, target.links[0].devices)
    precisions = _precisions_of(flags, config)
    _check_outputs(flags)
    law = _law_of(flags)
    if flags.json and (flags.verify or flags.link or law):
        raise UserError("--json", "it prints layouts only", "leave out --verify, --link and --scaling")
    if flags.verify:
        from jaxtrain.plan.compiler import devices_of

        devices_of(target, devices)  # reports a missing compiler before the search
    if flags.explain:
        if config.mesh.auto:
            raise UserError("--explain", "mesh=auto is not a layout yet", "leave --explain out")
        chosen = [estimate(config, target, devices, flags.documents)]
        tell_json(figures_of(chosen[0], flags.tokens)) if flags.json else tell(explained(chosen[0]))
    else:
        # With mesh=auto, search only what a run would: the config's settings with any mesh.
        with Work("search", unit="layouts") as work:
            found = fastest_mesh(config, target, devices) if config.mesh.auto else search(
                config, target, devices, precisions=precisions, progress=partial(_progress, work))
        if flags.json:
            tell_json(*({**choice.overrides, **figures_of(choice.estimate, flags.tokens)}
                        for choice in found.fitting[:flags.top]))
        else:
            tell(table(found, flags.top, flags.tokens))
        if flags.output:
            html.write(found, flags.output, flags.config, flags.top, flags.tokens)
        chosen = [choice.estimate for choice in found.fitting]
    if flags.link and chosen:
        tell(f"\n{between_islands(config, chosen[0], flags.link, flags.slowest)}")
    if law and chosen:
        tell("", reached(law, chosen[0], flags.tokens, flops=flags.flops, dollars=flags.dollars, source=flags.scaling),
             sep="\n")
    for rank, guess in enumerate(chosen[:flags.verify]):
        tell(verified(guess, flags.roofline, flags.timeline if rank == 0 else None))
    if not chosen or not chosen[0].fits:
        raise SystemExit(exit_statuses.NO)


def _config_of(flags: argparse.Namespace, overrides: dict[str, str]) -> "Config":
    """Return the config with what the flags change in it, or refuse a flag's number."""
    from jaxtrain.config.load import load_config
    from jaxtrain.plan.estimate import change

    config = load_config(flags.config, overrides)
    for name in ("global_batch_size", "seq_len", "documents", "top", "tokens"):
        if (value := getattr(flags, name)) is not None and not 1 <= value < math.inf:
            raise UserError(f"--{name}", f"{value} is too few", "give 1 or more")
    asked = {"data.global_batch_size": flags.global_batch_size, "data.seq_len": flags.seq_len}
    config = change(config, {key: value for key, value in asked.items() if value})
    if flags.link is not None and (flags.link <= 0 or not config.diloco.count):
        raise UserError("--link", "it is the rate of a link between islands, and above 0",
                        "set diloco.count too, or leave it out")
    if not 1 <= flags.slowest < math.inf or (flags.slowest > 1 and flags.link is None):
        raise UserError("--slowest", "it is not a factor of 1 or more",
                        "give --link too, or leave it out")
    return config


def _precisions_of(flags: argparse.Namespace, config: "Config") -> list[str]:
    """Return the further precisions to rank."""
    precisions = [name.strip() for name in flags.precisions.split(",") if name.strip()]
    if unknown := [name for name in precisions if name not in PRECISIONS]:
        raise UserError("--precisions", f"{unknown[0]} is not a precision", nearest(unknown[0], PRECISIONS))
    if precisions and (flags.explain or config.mesh.auto):
        raise UserError("--precisions", f"{'--explain' if flags.explain else 'mesh=auto'} keeps the config's precision",
                        "leave one of them out, or set train.precision")
    return precisions


def _check_outputs(flags: argparse.Namespace) -> None:
    """Refuse files that cannot be written, or have nothing to show, before the search."""
    from jaxtrain.plan.report import html

    if flags.output:
        if flags.explain:
            raise UserError("--output", "--explain covers only one layout", "leave one of them out")
        html.writable(flags.output)
    if (flags.roofline or flags.timeline) and not flags.verify:
        raise UserError("--roofline" if flags.roofline else "--timeline", "it reads a compiled step, and none is asked "
                        "for", "add --verify=1")
    if flags.timeline:
        html.writable(flags.timeline, "--timeline")


def _law_of(flags: argparse.Namespace) -> Any:
    """Return the scaling law that `--scaling` names; None without one."""
    if flags.scaling:
        from jaxtrain.plan.scaling_laws import saved_fit

        law = saved_fit.load(flags.scaling)
        saved_fit.budget(flags.flops, flags.dollars)  # reports mistakes before the search
        return law
    if flags.flops is not None or flags.dollars is not None:
        raise UserError("--flops" if flags.flops is not None else "--dollars", "it is read with --scaling only",
                        "give that too, or leave it out")
    return None


def _place(flags: argparse.Namespace) -> tuple[targets.Target, int]:
    """Return the target and its number of devices: the available devices, unless a target is named."""
    if flags.target:
        return targets.parse(flags.target, flags.targets)
    import jax

    return targets.here(), jax.device_count()


def _progress(work: Work, done: int, ahead: int) -> None:
    work.total = done + ahead
    work.add()
