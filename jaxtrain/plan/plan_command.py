"""The command `jaxtrain plan`: rank layouts, explain one, and compile the best for the real target."""

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

from jaxtrain.config.hybrid_mesh import with_hybrid_mesh
from jaxtrain.config.load import load_config
from jaxtrain.config.schema import PRECISIONS, Config
from jaxtrain.errors import UserError, nearest, tell
from jaxtrain.files.work_progress import Work
from jaxtrain.plan import targets
from jaxtrain.plan.cost.time import said
from jaxtrain.plan.estimate import Estimate, change, estimate
from jaxtrain.plan.instructions import program
from jaxtrain.plan.report import html
from jaxtrain.plan.report.compiled_step import picture, roofline_table
from jaxtrain.plan.report.table import explained, table
from jaxtrain.plan.search import fastest_mesh, search
from jaxtrain.plan.source_lines import source_lines
from jaxtrain.plan.timeline import simulate

GB = 1e9


def run(flags: argparse.Namespace, overrides: dict[str, str]) -> None:
    """Do what the flags ask for; raises `SystemExit` with status 1 if nothing fits."""
    config = _config_of(flags, overrides)
    target, devices = place(flags)
    if config.mesh.hsdp and not flags.explain:
        raise UserError("mesh.hsdp", "without --explain the planner compares many meshes, and mesh=hsdp is one",
                        "add --explain, or leave out mesh=hsdp")
    config = with_hybrid_mesh(config, devices, target.links[0].devices)
    precisions = _precisions_of(flags, config)
    _check_outputs(flags)
    law = _law_of(flags)
    if flags.verify:
        from jaxtrain.plan.compiler import devices_of

        devices_of(target, devices)  # reports a missing compiler before the search
    if flags.explain:
        if config.mesh.auto:
            raise UserError("--explain", "mesh=auto is not a layout yet", "leave --explain out")
        chosen = [estimate(config, target, devices)]
        tell(explained(chosen[0]))
    else:
        # With mesh=auto, search only what a run would: the config's settings with any mesh.
        with Work("search", unit="layouts") as work:
            found = fastest_mesh(config, target, devices) if config.mesh.auto else search(
                config, target, devices, precisions=precisions, progress=partial(_progress, work))
        tell(table(found, flags.top, flags.tokens))
        if flags.output:
            html.write(found, flags.output, flags.config, flags.top, flags.tokens)
        chosen = [choice.estimate for choice in found.fitting]
    if flags.link and chosen:
        tell(f"\n{between_islands(config, chosen[0], flags.link, flags.slowest)}")
    if law and chosen:
        tell(f"\n{reached(law, chosen[0], flags)}")
    for rank, guess in enumerate(chosen[:flags.verify]):
        tell(verified(guess, flags.roofline, flags.timeline if rank == 0 else None))
    if not chosen or not chosen[0].fits:
        raise SystemExit(1)


def _config_of(flags: argparse.Namespace, overrides: dict[str, str]) -> Config:
    """Return the config with what the flags change in it, or refuse a flag's number."""
    config = load_config(flags.config, overrides)
    for name in ("global_batch", "seq_len", "top", "tokens"):
        if (value := getattr(flags, name)) is not None and not 1 <= value < math.inf:
            raise UserError(f"--{name}", f"{value} is too few", "give 1 or more")
    asked = {"data.global_batch_size": flags.global_batch, "data.seq_len": flags.seq_len}
    config = change(config, {key: value for key, value in asked.items() if value})
    if flags.link is not None and (flags.link <= 0 or not config.islands.count):
        raise UserError("--link", "it is the rate of a link between islands, and above 0",
                        "set islands.count too, or leave it out")
    if not 1 <= flags.slowest < math.inf or (flags.slowest > 1 and flags.link is None):
        raise UserError("--slowest", "it is not a factor of 1 or more",
                        "give --link too, or leave it out")
    return config


def _precisions_of(flags: argparse.Namespace, config: Config) -> list[str]:
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
        saved_fit.budget(flags, 0.0)  # reports mistakes before the search
        return law
    if flags.flops is not None or flags.dollars is not None:
        raise UserError("--flops" if flags.flops is not None else "--dollars", "it is read with --scaling only",
                        "give that too, or leave it out")
    return None


def reached(law: Any, guess: Estimate, flags: argparse.Namespace) -> str:
    """Return the loss that a layout's run reaches by a scaling law, and what its budget gets at best, as text."""
    from jaxtrain.plan.scaling_laws import saved_fit
    from jaxtrain.plan.scaling_laws.finished_runs import parameters

    size = parameters(guess.config)
    own = 6 * size * flags.tokens
    flops = saved_fit.budget(flags, own / guess.cost(flags.tokens) if guess.target.price else 0.0) or own
    said = f"{flops:.3g} FLOPs" + (f", ${flags.dollars:,.0f}," if flags.dollars else ", as many,"
                                   if flops == own else "")
    return (f"by {flags.scaling}, the loss is {saved_fit.predicted(law, size, flags.tokens)}\n"
            f"{said} get at best {saved_fit.at_best(law, flops)}")


def between_islands(config: Any, guess: Estimate, link: float, slowest: float) -> str:
    """Return how long a step takes in each mode of islands of this layout, joined by so many gigabits a second.

    One of them takes `slowest` times as long for a step.
    """
    import jax

    from jaxtrain.builder import build
    from jaxtrain.plan.cost import island_time

    run = build(guess.config, devices=guess.devices, platform=guess.target.described)
    size = sum(leaf.size for leaf in jax.tree.leaves(run.abstract.params))
    rate, progress = link * 1e9 / 8, island_time.progress_bytes(config.islands, run.abstract.params, run.layout.axes)
    found, at_port = (island_time.modes(config.islands, guess.seconds, size, rate, progress=progress, port=port,
                                        slowest=slowest) for port in (math.inf, rate))
    return island_time.table(found, at_port, rate)


def place(flags: argparse.Namespace) -> tuple[targets.Target, int]:
    """Return the target and its number of devices: the available devices, unless a target is named."""
    if flags.target:
        return targets.parse(flags.target, flags.targets)
    import jax

    return targets.here(), jax.device_count()


def verified(guess: Estimate, roofline: bool = False, timeline: str | None = None) -> str:
    """Compare the compiler's figures with the prediction, as text.

    Args:
        roofline: also say what the compiled operations take.
        timeline: the file into which the compiled step is drawn.
    """
    from jaxtrain.plan.compiler import compile_answering, compile_step

    real, own = compile_step(guess.config, guess.target, guess.devices), guess.memory.total()
    own -= guess.memory["reward model"]  # which is beside the step
    mesh = " ".join(f"{axis}={size}" for axis, size in guess.mesh.items() if size > 1) or "one device"
    lines = [f"compiled for {guess.devices} x {guess.target.name} in {real.seconds:.0f} s, {mesh} "
             f"accumulation={guess.config.train.accumulation} remat={guess.config.train.remat}"
             f"{' offload=True' if guess.host else ''}:",
             f"  {'memory of a device':<40}{real.bytes / GB:10.3f} GB, predicted {own / GB:.3f} "
             f"({own / real.bytes - 1:+.1%})"]
    if guess.answering:
        lines += [f"  {f'answering ({phase})':<40}{size / GB:10.3f} GB, predicted "
                  f"{(ours := guess.answering[phase].total()) / GB:.3f} ({ours / size - 1:+.1%})"
                  for phase, size in compile_answering(guess.config, guess.target, guess.devices).items()]
    for key in sorted({*real.talked, *guess.talked}, key=lambda key: -real.talked[key]):
        if max(real.talked[key], guess.talked[key]) > 1e-3 * max(1, real.talked.total()):
            lines.append(f"  {said(*key):<40}{real.talked[key] / GB:10.3f} GB, predicted "
                         f"{guess.talked[key] / GB:.3f}")
    if roofline or timeline:
        code = program(real.text)
        simulated = simulate(code, guess.target, guess.mesh)
        if roofline:
            lines.append(roofline_table(simulated, guess, code, source_lines(real.text)))
        if timeline:
            Path(timeline).write_text(picture(simulated))
            lines.append(f"  timeline of one step: {timeline}")
    return "\n".join(lines)


def _progress(work: Work, done: int, ahead: int) -> None:
    work.total = done + ahead
    work.add()
