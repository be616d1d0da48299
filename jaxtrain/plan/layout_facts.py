"""A planned layout in words: the loss that its run reaches, its steps between islands, and what the compiler says."""

import math
from pathlib import Path
from typing import Any

from jaxtrain.plan.cost.time import said
from jaxtrain.plan.estimate import Estimate
from jaxtrain.plan.instructions import program
from jaxtrain.plan.report.compiled_step import drawing, roofline_table
from jaxtrain.plan.source_lines import source_lines
from jaxtrain.plan.timeline import simulate

GB = 1e9


def reached(law: Any, guess: Estimate, tokens: float, *, flops: float | None = None, dollars: float | None = None,
            source: str = "the scaling law") -> str:
    """Return the loss that a layout's run reaches by a scaling law, and what its budget gets at best, as text.

    The budget is that of the run, unless it is given in FLOPs or in dollars.
    """
    from jaxtrain.plan.scaling_laws import saved_fit
    from jaxtrain.plan.scaling_laws.finished_runs import parameters

    size = parameters(guess.config)
    own = 6 * size * tokens
    flops = saved_fit.budget(flops, dollars, own / guess.cost(tokens) if guess.target.price else 0.0) or own
    said = f"{flops:.3g} FLOPs" + (f", ${dollars:,.0f}," if dollars else ", as many,"
                                   if flops == own else "")
    return (f"by {source}, the loss is {saved_fit.predicted(law, size, tokens)}\n"
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
    rate, progress = link * 1e9 / 8, island_time.progress_bytes(config.diloco, run.abstract.params, run.layout.axes)
    found, at_port = (island_time.modes(config.diloco, guess.seconds, size, rate, progress=progress, port=port,
                                        slowest=slowest) for port in (math.inf, rate))
    return island_time.table(found, at_port, rate)


def verified(guess: Estimate, roofline: bool = False, timeline: str | None = None) -> str:
    """Compare the compiler's figures with the prediction, as text.

    Args:
        roofline: also say what the compiled operations take.
        timeline: the file into which the compiled step is drawn.
    """
    from jaxtrain.plan.compiler import compile_answering, compile_step

    real, own = compile_step(guess.config, guess.target, guess.devices), guess.memory.total()
    own -= guess.memory["reward model"] + guess.memory["teacher"]  # which are beside the step
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
        simulated = simulate(code, guess.target, guess.mesh, guess.documents)
        if roofline:
            lines.append(roofline_table(simulated, guess, code, source_lines(real.text)))
        if timeline:
            Path(timeline).write_text(drawing(simulated))
            lines.append(f"  timeline of one step: {timeline}")
    return "\n".join(lines)
