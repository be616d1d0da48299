"""Draw stacked bars as HTML and CSS, so that their text stays readable at any width.

Each part has one colour in all bars and its name in the legend, and inside the bar where there is room for it. Hidden
time is hatched and lies below the bar, to the same scale, since it adds nothing to the sum. The numbers are in the text
alternative of a bar and in the table below it.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from html import escape

# All light enough for black letters, which they therefore have in dark mode too.
COOL = ("#8fb8de", "#a7d3c4", "#c3c9e8", "#b9dbe6", "#cdd6c0", "#a9bfc9", "#d5d0e5", "#bcd9a8")
WARM = ("#f6a55c", "#f2c14e", "#ee8a7d", "#e3a6cf", "#d9b382", "#f3d7a0", "#d98fa1", "#e8c7b5",
        "#c9a0dc", "#e0d36b", "#c98d5f", "#f7b6c9", "#b8a15a", "#cf9f92")


@dataclass(frozen=True)
class Bar:
    """One bar: parts that add up to its length, and hidden ones beside it."""

    label: str
    parts: Counter
    hidden: Counter = field(default_factory=Counter)


@dataclass(frozen=True)
class Look:
    """The look of bars: the colour of each part by name, by group of the legend, and the format of amounts."""

    groups: dict[str, list[str]]
    colours: dict[str, str]
    written: Callable[[float], str]

    @classmethod
    def of(cls, bars: Sequence[Bar], warm: Collection[str], titles: tuple[str, str],
           written: Callable[[float], str]) -> "Look":
        """Give every part a colour, largest first: `warm` parts form the second group, the others the first."""
        totals = sum((positive(bar.parts) + bar.hidden for bar in bars), Counter())
        names = [name for name, _ in totals.most_common()]
        groups = {titles[0]: [name for name in names if name not in warm],
                  titles[1]: [name for name in names if name in warm]}
        colours = {}
        for palette, group in zip((COOL, WARM), groups.values(), strict=True):
            colours.update(zip(group, itertools.cycle(palette), strict=False))
        return cls({title: group for title, group in groups.items() if group}, colours, written)

    def only(self, names: Collection[str]) -> "Look":
        """Return the same look for some of the parts."""
        groups = {title: [name for name in group if name in names] for title, group in self.groups.items()}
        return replace(self, groups={title: group for title, group in groups.items() if group})


def chart(bars: Sequence[Bar], look: Look, limits: Sequence[tuple[str, float]] = (), hidden: str = "") -> str:
    """Return the legend and the bars; `limits`: lines across all bars; `hidden`: what hatched ones are."""
    longest = [max(positive(bar.parts).total(), bar.hidden.total()) for bar in bars]
    most = max(longest + [size for _, size in limits]) or 1.0
    return "\n".join(['<div class="chart">', *_legend(look, limits, hidden if any(bar.hidden for bar in bars) else ""),
                      *(_bar(bar, look, most, limits) for bar in bars), "</div>"])


def positive(parts: Counter) -> Counter:
    """Subtract negative parts (memory used twice) from the largest part, so that the sum stays the same."""
    drawn = +parts
    if drawn and (missing := drawn.total() - parts.total()):
        drawn[drawn.most_common(1)[0][0]] -= missing
    return drawn


def _legend(look: Look, limits: Sequence[tuple[str, float]], hidden: str) -> list[str]:
    lines = []
    for title, names in look.groups.items():
        items = "".join(f'<li><i style="--c:{look.colours[name]}"></i>{escape(name)}</li>' for name in names)
        lines.append(f'<ul class="legend"><li class="group">{escape(title)}</li>{items}</ul>')
    rest = [f'<li><i class="hatched" style="--c:{WARM[0]}"></i>{escape(hidden)}</li>'] if hidden else []
    rest += [f'<li><i class="mark mark{i}"></i>{escape(name)}: {look.written(size)}</li>'
             for i, (name, size) in enumerate(limits)]
    return [*lines, f'<ul class="legend">{"".join(rest)}</ul>'] if rest else lines


def _bar(bar: Bar, look: Look, most: float, limits: Sequence[tuple[str, float]]) -> str:
    parts, total = positive(bar.parts), look.written(bar.parts.total())
    order = [name for group in look.groups.values() for name in group]
    said = f"{bar.label}: {total}, of which {_spoken(parts, order, look)}"
    said += f"; hidden: {_spoken(bar.hidden, order, look)}" if bar.hidden else ""
    marks = "".join(f'<span class="mark mark{i}" style="left:{size / most:.4%}" data-limit="{size!r}"></span>'
                    for i, (_, size) in enumerate(limits))
    below = f'<div class="hidden">{_segments(bar.hidden, order, look, most, " hatched")}</div>' if bar.hidden else ""
    return "\n".join([
        f'<figure><figcaption>{escape(bar.label)} <b>{total}</b></figcaption>',
        f'<div class="bar" role="img" aria-label="{escape(said)}"><div class="stack">'
        f'{_segments(parts, order, look, most, "")}</div>{below}{marks}</div>',
        f"<details><summary>Numbers</summary>{_numbers(bar, parts, order, look)}</details></figure>"])


def _segments(parts: Counter, order: list[str], look: Look, most: float, kind: str) -> str:
    return "".join(
        f'<span class="part{kind}" style="width:{parts[name] / most:.5%};--c:{look.colours[name]}" '
        f'data-part="{escape(name)}" data-value="{parts[name]!r}" title="{escape(name)}: {look.written(parts[name])}">'
        f"<span></span><span>{escape(name)}</span></span>" for name in order if parts[name] > 0)


def _numbers(bar: Bar, parts: Counter, order: list[str], look: Look) -> str:
    hidden = bool(bar.hidden)
    head = "<tr><th>part</th><th>amount</th>" + "<th>hidden</th>" * hidden + "</tr>"
    rows = [f'<tr><td class="text">{escape(name)}</td><td>{look.written(parts[name])}</td>'
            + f"<td>{look.written(bar.hidden[name]) if bar.hidden[name] else ''}</td>" * hidden + "</tr>"
            for name in order if parts[name] > 0 or bar.hidden[name]]
    total = f'<tr class="total"><td class="text">sum</td><td>{look.written(bar.parts.total())}</td>'
    total += f"<td>{look.written(bar.hidden.total())}</td>" * hidden + "</tr>"
    return f"<table>{head}{''.join(rows)}{total}</table>"


def _spoken(parts: Counter, order: list[str], look: Look) -> str:
    return ", ".join(f"{name} {look.written(parts[name])}" for name in order if parts[name] > 0)
