"""Draw points and lines on two logarithmic axes as SVG, and a page of such drawings in the look of the planner's."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from jaxtrain.pages.page_parts import document
from jaxtrain.plan.report.curves import DASHES, PLOT, TALL, text

Points = Sequence[tuple[float, float]]


def log_log(title: str, across: str, series: Mapping[str, Points], joined: bool = True) -> str:
    """Draw series of points with positive coordinates, each joined by lines; the first may be rings alone.

    Args:
        across: what the horizontal axis is.
        joined: join the points of the first series too.
    """
    series = {name: [(x, y) for x, y in points if x > 0 and y > 0] for name, points in series.items()}
    flat = [point for points in series.values() for point in points] or [(1.0, 1.0)]
    (left, right), (low, high) = (_range([point[i] for point in flat]) for i in (0, 1))

    def place(x: float, y: float) -> tuple[float, float]:
        return (PLOT * (math.log10(x) - left) / (right - left), TALL - TALL * (math.log10(y) - low) / (high - low))

    said = "; ".join(f"{name}: " + ", ".join(f"{y:.3g} at {x:.3g}" for x, y in points)
                     for name, points in series.items())
    lines = [f'<svg class="curves" viewBox="-56 -24 {PLOT + 76} {TALL + 64 + 18 * len(series)}" role="img" '
             f'aria-label="{escape(f"{title} by {across}. {said}")}">',
             text(-56, -10, title), f'<path class="axis" d="M0 0V{TALL}H{PLOT}"/>']
    lines += [text(-6, TALL - TALL * share + 4, f"{10 ** (low + share * (high - low)):.3g}", "end")
              for share in (0, 0.5, 1)]
    lines += [text(PLOT * share, TALL + 18, f"{10 ** (left + share * (right - left)):.3g}", "middle")
              for share in (0, 0.5, 1)]
    lines.append(text(PLOT / 2, TALL + 36, across, "middle"))
    for i, (name, points) in enumerate(series.items()):
        places = [place(*point) for point in points]
        drawn = f'class="line{i % 2}" stroke-dasharray="{DASHES[i % 2] or 0}"'
        if joined or i:
            lines.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" {drawn}/>')
        if joined or not i:
            lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="line{i % 2}"/>' for x, y in places]
        lines += [f'<path d="M0 {TALL + 52 + 18 * i}H30" {drawn}/>', text(38, TALL + 56 + 18 * i, name)]
    return "\n".join([*lines, "</svg>"])


def page_of(title: str, charts: Sequence[str], body: str = "") -> str:
    """Return a page with drawings side by side, and HTML below them."""
    return document(title, [f'<h1>{escape(title)}</h1><div class="pair">{"".join(charts)}</div>{body}'])


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the logarithms of the least and the greatest value, somewhat apart even if they are equal."""
    low, high = math.log10(min(values)), math.log10(max(values))
    margin = max(0.05, 0.04 * (high - low))
    return low - margin, high + margin
