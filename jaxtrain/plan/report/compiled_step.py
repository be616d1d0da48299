"""Say what a compiled step costs by the simulated timeline: kinds of operations, the costliest ones, and a drawing."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from html import escape

from jaxtrain.plan import kinds
from jaxtrain.plan.cost.time import Time
from jaxtrain.plan.estimate import Estimate
from jaxtrain.plan.instructions import Instruction, Program
from jaxtrain.plan.timeline import COMPUTE, COPY, TALK, Loop, Operation, Timeline

TOP = 20
_COLOURS = {kinds.MATMUL: "#4c78a8", kinds.ATTENTION: "#72b7b2", kinds.HEAD: "#54a24b", kinds.OPTIMIZER: "#b279a2",
            kinds.ELEMENTWISE: "#eeca3b", kinds.COPIES: "#9d755d"}
_TALK = "#e45756"
_WIDTH, _LANE = 1200, 22


def roofline_table(timeline: Timeline, guess: Estimate, program: Program, line: Callable[[Instruction], str]) -> str:
    """Return the compiled step's predicted time by kind, what is wasted, and its costliest operations."""
    seconds, c = timeline.seconds, guess.config
    per_token = timeline.moved / (c.data.global_batch_size * c.data.seq_len / guess.devices * c.model.num_layers)
    lines = [f"  simulated with its instructions: {1e3 * seconds:.1f} ms a step"
             f"{f', MFU {mfu(timeline, guess):.1%}' if guess.useful else ''}{_within(guess, seconds)}; planned "
             f"{1e3 * guess.seconds:.1f} ms{_within(guess, guess.seconds)}"]
    lines += [f"    {kind:<40}{1e3 * took:10.2f} ms" for kind, took in timeline.by_kind().items()]
    lines += [f"    {'(' + kind + ', hidden)':<40}{1e3 * took:10.2f} ms"
              for kind, took in timeline.hidden().items()]
    lines += [f"    exposed communication {1e3 * timeline.exposed:.1f} ms; computed and never read "
              f"{1e3 * timeline.dead:.1f} ms; outside products {per_token / 1e6:.2f} MB a token and layer"]
    lines += [f"  loop {loop.name}: {loop.times:.0f} x {1e3 * loop.seconds:.2f} ms"
              for loop in timeline.loops if loop.times > 1]
    lines += [f"  the {TOP} costliest operations (ms of a step; * waited for; runs; what; result; line of jaxtrain):"]
    return "\n".join(lines + [_row(one, program, line) for one in timeline.operations[:TOP]])


def _within(guess: Estimate, seconds: float) -> str:
    """Return the 80 % interval of so many predicted seconds, with that of their MFU."""
    said = dataclasses.replace(guess, time=Time(Counter({"": seconds}))).interval_said
    return f" ({said})" if said else ""


def mfu(timeline: Timeline, guess: Estimate) -> float:
    """Return the share of the bfloat16 peak that the model's own arithmetic reaches in the simulated step."""
    return guess.useful / timeline.seconds / guess.target.peak["bfloat16"]


def drawing(timeline: Timeline) -> str:
    """Return the timeline as SVG: one panel for the program and one for each loop, to scale, with a lane a stream."""
    panels, top = [], 30
    for loop in sorted(timeline.loops, key=lambda loop: -loop.times * loop.seconds):
        if loop.spans and loop.seconds:
            panels.append(_panel(loop, top))
            top += 3 * _LANE + 50
    legend = "".join(
        f'<rect x="{10 + 130 * i}" y="6" width="12" height="12" fill="{colour}"/><text x="{26 + 130 * i}" y="16">'
        f"{escape(kind)}</text>" for i, (kind, colour) in enumerate([*_COLOURS.items(), ("communication", _TALK)]))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + 130} {top}" font-family="sans-serif" '
            f'font-size="12"><rect width="100%" height="100%" fill="white"/>{legend}{"".join(panels)}</svg>\n')


def _panel(loop: Loop, top: int) -> str:
    end = max(loop.seconds, *(span.end for span in loop.spans))
    times = f"{loop.times:.0f} times " if loop.times > 1 else ""
    parts = [f'<text x="10" y="{top + 12}">{escape(loop.name)}: {times}{1e3 * loop.seconds:.2f} ms</text>']
    for lane, stream in enumerate((COMPUTE, TALK, COPY)):
        y = top + 18 + lane * _LANE
        parts.append(f'<text x="10" y="{y + 15}" fill="#555">{stream}</text>')
        for span in loop.spans:
            if span.stream == stream:
                x, width = 120 + _WIDTH * span.begin / end, max(0.4, _WIDTH * (span.end - span.begin) / end)
                title = f"{span.name}: {span.kind}, {1e3 * (span.end - span.begin):.3f} ms"
                parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_LANE - 3}" '
                             f'fill="{_COLOURS.get(span.kind, _TALK)}"><title>{escape(title)}</title></rect>')
    return "".join(parts)


def _row(one: Operation, program: Program, line: Callable[[Instruction], str]) -> str:
    cost = max(one.exposed, one.seconds) if not kinds.is_sent(one.kind) else one.exposed
    what = "never read: " if one.dead else ""
    result = one.instruction.result
    return (f"    {1e3 * cost:9.2f}{'*' if kinds.is_sent(one.kind) else ' '}{one.times:6.0f}  "
            f"{what + one.kind:<28.28} {result if len(result) < 44 else result[:41] + '...':<44} "
            f"{line(one.instruction) or program.path(one.instruction)[-40:]}")
