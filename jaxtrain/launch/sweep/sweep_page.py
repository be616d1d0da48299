"""Write what a sweep found as one self-contained page: the points, how much each key matters, and the curves."""

import math
from collections.abc import Sequence
from html import escape

from jaxtrain.launch.job_record import quoted
from jaxtrain.launch.sweep import findings
from jaxtrain.launch.sweep.search_space import Range
from jaxtrain.launch.sweep.sweep_file import Sweep
from jaxtrain.launch.sweep.trials import Tried
from jaxtrain.pages.page_parts import document, html_table, paragraph
from jaxtrain.plan.report.curves import text

_WIDE, _TALL, _MARGIN = 720, 260, 60
_LETTER, _GAP = 7.5, 14  # pixels of a letter at most, and between two labels
_FIRST = 0.1  # of the steps, whose values do not set the range of curves
_MOST_LINES, _MOST_PLACES = 100, 200
_LINES = """<style>.lines{width:100%;height:auto;font:12px system-ui,sans-serif;fill:var(--text)}
.lines text{paint-order:stroke;stroke:var(--surface);stroke-width:3px}
.lines path{fill:none;stroke:var(--soft);stroke-width:1;stroke-opacity:.45}
.lines .axis{stroke-opacity:1}.lines .good{stroke:var(--line0);stroke-width:1.5;stroke-opacity:.9}
.lines .best{stroke:var(--line1);stroke-width:3;stroke-opacity:1}</style>"""


def page(sweep: Sweep, tried: Sequence[Tried]) -> str:
    """Return the page."""
    order = findings.ranked(sweep, tried)
    done = [point for point in order if point.state == "complete"]
    title = f"Sweep of {sweep.config}: {len(tried)} points, by {sweep.method}"
    counts = ", ".join(f"{sum(point.state == state for point in tried)} {state or 'run'}"
                       for state in ("complete", "stopped", "failed", "") if any(p.state == state for p in tried))
    parts = [_LINES, f"<h1>{escape(title)}</h1>", paragraph(f"{counts}. {sweep.metric}, "
             f"{'higher' if sweep.maximise else 'lower'} is better. Workdirs: {sweep.workdir}", "soft")]
    if done:
        parts += ['<section class="card"><h3>Best point</h3>', '<pre class="command">' + escape(quoted([
            f"--config.{key}={value}" for key, value in sweep.overrides(done[0].keys, None).items()])) + "</pre>",
            paragraph(f"{sweep.metric} {findings.value_of(done[0]):.6g}, {done[0].trials[0].workdir}"), "</section>"]
    head, rows = findings.rows(sweep, tried)
    parts += ["<h2>All points, best first</h2>", f'<div class="scroll">{html_table(head, rows, 2)}</div>']
    head, rows = findings.importance(sweep, tried)
    parts += ["<h2>How much each key matters</h2>", html_table(head, rows, 1), paragraph(
        "“Explains” is the share of the variance of the complete points' ranks that is explained by this key alone: "
        "by one group of points for each listed value, or four equal groups for a range. "
        "Corrected for chance. Interactions between keys are not included."
        + (" PED-ANOVA (Watanabe et al. 2023) compares the best tenth of the points with all of them."
           if len(head) > 2 else ""), "soft")]
    parts += ["<h2>Points as lines</h2>", paragraph(
        "Each line is a complete point: its values of the keys, and on the right its result. The best one is thick, "
        "the best fifth is blue.", "soft"), coordinates(sweep, done)]
    parts += [f"<h2>{escape(sweep.metric)} over steps</h2>", curves(order[:_MOST_LINES], sweep.sign)]
    return document(title, parts)


def coordinates(sweep: Sweep, done: Sequence[Tried]) -> str:
    """Draw parallel coordinates: an axis for each key and one for the metric, the better end of that above."""
    if not done:
        return "<p>None.</p>"
    values = [point.value or 0.0 for point in done]
    axes = [(key, _Axis.of(one)) for key, one in sweep.ranges.items()]
    worst, best = (max(values), min(values)) if sweep.sign > 0 else (min(values), max(values))
    axes.append((sweep.metric, _Axis(worst, best)))
    # Labels have their middle at their axis, so this much room for the longest keeps them all apart.
    longest = _LETTER * max(len(label) for name, axis in axes for label in (name, *map(findings.text_of, axis.marks())))
    margin = max(_MARGIN, longest / 2)
    step = max((_WIDE - 2 * margin) / (len(axes) - 1), longest + _GAP)
    wide = 2 * margin + step * (len(axes) - 1)
    lines = [_svg(f"{len(done)} points over {', '.join(name for name, _ in axes)}", wide)]
    for place, point in reversed([*enumerate(done)]):
        at = [axis.place(value) for (_, axis), value in zip(axes, [*point.keys.values(), point.value], strict=True)]
        lines.append(_line([(margin + step * i, _TALL - _TALL * up) for i, up in enumerate(at)], place, len(done),
                           f"trial {point.trials[0].number}"))
    for i, (name, axis) in enumerate(axes):
        x = margin + step * i
        lines += [f'<path class="axis" d="M{x:.1f} 0V{_TALL}"/>', text(x, -24, name, "middle")]
        lines += [text(x, 16 + (_TALL - 22) * (1 - axis.place(mark)), findings.text_of(mark), "middle")
                  for mark in axis.marks()]
    return "\n".join(['<div class="scroll">', *lines, "</svg></div>"])


class _Axis:
    """A vertical axis from 0 to 1: of a range, or of listed values at equal distances."""

    def __init__(self, low: float, high: float, log: bool = False, values: Sequence[object] = ()):
        self._low, self._high, self._log, self._values = low, high, log, values

    @classmethod
    def of(cls, one: Range) -> "_Axis":
        return cls(one.low, one.high, one.log, one.values)

    def place(self, value: object) -> float:
        if self._values:
            return (self._values.index(value) + 0.5) / len(self._values)
        low, high, this = ((math.log(each) if self._log else each)
                           for each in (self._low, self._high, float(value)))  # pyrefly: ignore[bad-argument-type]
        return (this - low) / (high - low) if high != low else 0.5

    def marks(self) -> Sequence[object]:
        return self._values or [self._low, self._high]


def curves(points: Sequence[Tried], sign: int) -> str:
    """Draw the metric of trials over their steps, the best first; outliers are cut off above."""
    drawn = [[(step, value) for step, value in sorted(trial.curve.values.items()) if math.isfinite(value)]
             for point in points for trial in point.trials]
    steps = max((step for curve in drawn for step, _ in curve), default=0)
    # What the first steps reach would make all that follows a flat line.
    values = sorted(sign * value for curve in drawn for step, value in curve if step >= _FIRST * steps)
    if not values:
        return "<p>None.</p>"
    low = min(sign * value for curve in drawn for _, value in curve)
    high = values[min(len(values) - 1, math.ceil(0.95 * len(values)))]
    low, high = (low, high) if high > low else (low - 0.5, low + 0.5)

    def height(value: float) -> float:
        worse = min(1.0, (sign * value - low) / (high - low))
        return _TALL * (1 - worse if sign > 0 else worse)

    lines = [_svg(f"{len(drawn)} trials over {steps} steps")]
    for place, curve in reversed([*enumerate(drawn)]):
        thin = curve[::max(1, len(curve) // _MOST_PLACES)] + curve[-1:]
        lines.append(_line([(_MARGIN + (_WIDE - 2 * _MARGIN) * step / steps, height(value)) for step, value in thin],
                           place, len(drawn), ""))
    top, bottom = (high, low) if sign > 0 else (-low, -high)
    lines += [f'<path class="axis" d="M{_MARGIN} 0V{_TALL}H{_WIDE - _MARGIN}"/>',
              text(_MARGIN - 6, 10, f"{top:.4g}", "end"), text(_MARGIN - 6, _TALL, f"{bottom:.4g}", "end"),
              text(_WIDE - _MARGIN, _TALL + 18, f"{steps:,} steps", "end")]
    return "\n".join([*lines, "</svg>"])


def _svg(said: str, wide: float = _WIDE) -> str:
    least = f' style="min-width:{wide:.0f}px"' if wide > _WIDE else ""  # the page scrolls rather than shrink labels
    return f'<svg class="lines" viewBox="0 -40 {wide:.0f} {_TALL + 70}"{least} role="img" aria-label="{escape(said)}">'


def _line(places: Sequence[tuple[float, float]], place: int, count: int, title: str) -> str:
    kind = ' class="best"' if place == 0 else ' class="good"' if place < count / 5 else ""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return f'<path d="{path}"{kind}>' + (f"<title>{escape(title)}</title>" if title else "") + "</path>"
