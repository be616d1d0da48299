"""Draw lines over numbers of devices as SVG, as wide as a phone."""

import math
from html import escape

PLOT, TALL = 270, 180  # width and height of the area of the lines
DASHES = ("", "6 3")


def curves(title: str, xs: list[int], series: dict[str, dict[int, float]], percent: bool) -> str:
    """Draw lines over numbers that double, with a ring at every point; colours are the page's `--line0`, `--line1`."""
    def shown(value: float) -> str:
        return f"{value:.0%}" if percent else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"

    most = max((value for points in series.values() for value in points.values()), default=1.0)
    step = PLOT / len(xs)
    said = "; ".join(f"{name}: " + ", ".join(f"{shown(value)} on {x:,}" for x, value in points.items())
                     for name, points in series.items())
    lines = [f'<svg class="curves" viewBox="-56 -24 {PLOT + 60} {TALL + 104}" role="img" '
             f'aria-label="{escape(f"{title} by number of devices. {said}")}">',
             text(-56, -10, title), f'<path class="axis" d="M0 0V{TALL}H{PLOT}"/>']
    marks = ticks(most)
    if marks[-1] < most:
        marks.append(marks[-1] + marks[1])
    top = marks[-1]
    lines += [text(-6, TALL - TALL * tick / top + 4, f"{tick:.0%}" if percent else f"{tick:,g}", "end")
              for tick in marks]
    lines += [text(step * (i + 0.5), TALL + 18, f"{x:,}", "middle") for i, x in enumerate(xs)]
    lines.append(text(PLOT / 2, TALL + 36, "devices", "middle"))
    for i, (name, points) in enumerate(series.items()):
        places = [(step * (xs.index(x) + 0.5), TALL - TALL * value / top) for x, value in points.items()]
        drawn = f'class="line{i}" stroke-dasharray="{DASHES[i] or 0}"'
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        lines += [f'<polyline points="{joined}" {drawn}/>',
                  *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 + 2 * i}" class="line{i}"/>' for x, y in places),
                  f'<path d="M0 {TALL + 52 + 18 * i}H30" {drawn}/>', text(38, TALL + 56 + 18 * i, name)]
    return "\n".join([*lines, "</svg>"])


def ticks(most: float) -> list[float]:
    """Return about five round numbers from 0 up."""
    rough = most / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * one for one in (1, 2, 5, 10) if power * one >= rough)
    return [round(step * i, 12) for i in range(math.floor(most / step) + 1)]


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """Return words that begin, end or have their middle at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
