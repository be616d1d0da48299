"""Draw stacked bars and lines as SVG for a page; lengths are exact to a thousandth of a pixel."""

import math
import string
from collections import Counter
from html import escape

WIDTH, BAR, ROW, BOX = 700, 16, 42, 16  # of the longest bar; heights of a bar and of its row; side of a legend's box
# Light enough for black letters on them.
COLOURS = ("#8dd3c7", "#fdb462", "#80b1d3", "#fb8072", "#b3de69", "#bebada", "#fccde5", "#ffed6f", "#d9d9d9",
           "#bc80bd", "#ccebc5", "#e5c494")
PLOT, TALL = 360, 190  # width and height of lines
LINES = (("#1f5f99", ""), ("#b8480a", "6 3"))  # colour, dashes
FONT = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12"'


def bars(stacks: list[tuple[str, Counter]], unit: str, scale: float, limits: list[tuple[str, float]]) -> str:
    """Draw one bar per line, with a letter for each part, for prints in black and white; `scale`: of one unit."""
    drawn = [(label, _positive(parts)) for label, parts in stacks]
    names = [name for name, _ in sum((parts for _, parts in drawn), Counter()).most_common()]
    most = max([parts.total() for _, parts in drawn] + [value for _, value in limits])
    per_pixel, top = most / WIDTH, 20 * math.ceil(len(names) / 3) + 30
    bottom = top + ROW * len(drawn)
    lines = [f'<svg {FONT} viewBox="0 0 {WIDTH + 130} {bottom + 40}" width="{WIDTH + 130}" '
             f'data-per-pixel="{per_pixel!r}">']
    look = {name: (COLOURS[i % len(COLOURS)], string.ascii_letters[i % 52]) for i, name in enumerate(names)}
    for i, (name, (colour, letter)) in enumerate(look.items()):
        x, y = 275 * (i % 3), 20 * (i // 3)
        lines.append(f'<rect x="{x}" y="{y}" width="{BOX}" height="{BOX}" fill="{colour}"/><text x="{x + BOX / 2:g}" '
                     f'y="{y + 12}" text-anchor="middle">{letter}</text>{_text(x + BOX + 6, y + 12, name)}')
    for row, (label, parts) in enumerate(drawn):
        x, y = 0.0, top + ROW * row + 20
        lines.append(f'<g class="bar">{_text(0, y - 5, label)}')
        for name, (colour, letter) in look.items():
            if width := parts[name] / per_pixel:
                lines.append(f'<rect x="{x:.4f}" y="{y}" width="{width:.4f}" height="{BAR}" fill="{colour}" '
                             f'data-part="{escape(name)}"><title>{escape(name)}: {parts[name] / scale:,.2f} {unit}'
                             "</title></rect>")
                if width > 12:
                    lines.append(_text(x + width / 2, y + 12, letter, "middle"))
                x += width
        lines.append(f"{_text(x + 5, y + 12, f'{parts.total() / scale:,.1f} {unit}')}</g>")
    lines += [_text(tick * scale / per_pixel, bottom + 34, f"{tick:,g} {unit}" if tick else "0",
                    "middle" if tick else "start") for tick in ticks(most / scale)]
    for i, (name, value) in enumerate(limits):
        x = value / per_pixel
        lines += [f'<path d="M{x:.4f} {top - 4}V{bottom + 8}" stroke="#000" stroke-dasharray="{5 * i}" '
                  f'data-limit="{value!r}"/>',
                  _text(x, bottom + 20 if i else top - 8, f"{name}: {value / scale:.1f} {unit}", "middle")]
    return "\n".join([*lines, "</svg>"])


def curves(title: str, xs: list[int], series: dict[str, dict[int, float]], percent: bool) -> str:
    """Draw lines over numbers that double, with a ring at every point."""
    most = max((value for points in series.values() for value in points.values()), default=1.0)
    step = PLOT / len(xs)
    lines = [f'<svg {FONT} viewBox="-60 -30 {PLOT + 60} {TALL + 110}" width="{PLOT + 60}">',
             _text(-60, -14, title), f'<path d="M0 0V{TALL}H{PLOT}" fill="none" stroke="#555"/>']
    marks = ticks(most)
    if marks[-1] < most:
        marks.append(marks[-1] + marks[1])
    top = marks[-1]
    for tick in marks:
        lines.append(_text(-6, TALL - TALL * tick / top + 4, f"{tick:.0%}" if percent else f"{tick:,g}", "end"))
    for i, x in enumerate(xs):
        lines.append(_text(step * (i + 0.5), TALL + 18, f"{x:,}", "middle"))
    lines.append(_text(PLOT / 2, TALL + 36, "devices", "middle"))
    for i, (name, points) in enumerate(series.items()):
        colour, dashes = LINES[i]
        places = [(step * (xs.index(x) + 0.5), TALL - TALL * value / top) for x, value in points.items()]
        drawn = f'stroke="{colour}" fill="none" stroke-width="2" stroke-dasharray="{dashes or 0}"'
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        lines += [f'<polyline points="{joined}" {drawn}/>',
                  *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 + 2 * i}" fill="none" stroke="{colour}"/>'
                    for x, y in places),
                  f'<path d="M0 {TALL + 50 + 18 * i}H30" {drawn}/>', _text(38, TALL + 54 + 18 * i, name)]
    return "\n".join([*lines, "</svg>"])


def ticks(most: float) -> list[float]:
    """Return about five round numbers from 0 up."""
    rough = most / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * one for one in (1, 2, 5, 10) if power * one >= rough)
    return [round(step * i, 12) for i in range(math.floor(most / step) + 1)]


def _positive(parts: Counter) -> Counter:
    """Subtract negative parts (places used twice) from the largest part, so that the sum stays the same."""
    drawn = +parts
    if missing := drawn.total() - parts.total():
        drawn[drawn.most_common(1)[0][0]] -= missing
    return drawn


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
