"""Grids of coloured cells as one SVG file, for pages that show images but no HTML."""

from collections.abc import Iterator, Sequence
from html import escape

from jaxtrain.pages.notebook_drawing import Grid, fill

_LEAST, _HIGH, _LINE, _EDGE, _WIDEST = 72, 40, 20, 16, 760  # pixels: a cell, a line of text, margins, the drawing
_LETTER = 7.8  # pixels: more than a letter of a label takes on average
# An image is drawn on its own background, since it does not know that of the page.
_STYLE = ("<style>svg{font:13px system-ui,sans-serif;text-anchor:middle}.surface{fill:#fff}text{fill:#1d2129}"
          ".soft{fill:#596273}.start{text-anchor:start}.end{text-anchor:end}"
          "@media(prefers-color-scheme:dark){.surface{fill:#14171c}text{fill:#e6e9ef}.soft{fill:#a3adbd}}</style>")


def drawn(title: str, shown: Sequence[Grid | str]) -> str:
    """Return the SVG: a title, the grids beside each other as far as there is room, and what is said below them."""
    lines, x, y, high = [_text(_EDGE, _EDGE + 14, title, "start")], float(_EDGE), _EDGE + 24.0, 0.0
    wide = _EDGE + _LETTER * len(title)
    for one in shown:
        across, down = (_LETTER * len(one), float(_LINE)) if isinstance(one, str) else _size(one)
        if x > _EDGE and (x + across > _WIDEST or isinstance(one, str)):
            x, y, high = float(_EDGE), y + high + 12, 0.0
        lines += [_text(x, y + 14, one, "soft start")] if isinstance(one, str) else _grid(one, x, y)
        wide, high, x = max(wide, x + across), max(high, down), x + across + 28
    width, height = round(wide + _EDGE), round(y + high + _EDGE)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img">', f"<title>{escape(title)}</title>{_STYLE}",
        f'<rect class="surface" width="{width}" height="{height}" rx="8"/>', *lines, "</svg>"])


def _size(grid: Grid) -> tuple[float, float]:
    count = max((len(cells) for _, cells in grid.rows), default=0)
    return _names(grid) + count * _cell(grid), _head(grid) + len(grid.rows) * _HIGH


def _cell(grid: Grid) -> float:
    """Return the width of a cell."""
    return max(_LEAST, max(map(len, grid.columns), default=0) * _LETTER + 8)


def _names(grid: Grid) -> float:
    """Return the width of the column with the rows' names."""
    longest = max((len(name) for name, _ in grid.rows), default=0)
    return longest * _LETTER + 8 if longest else 0


def _head(grid: Grid) -> int:
    return _LINE * (bool(grid.title) + any(grid.columns))


def _grid(grid: Grid, x: float, y: float) -> Iterator[str]:
    left, top, wide = x + _names(grid), y + _head(grid), _cell(grid)
    if grid.title:
        yield _text(x, y + 14, grid.title, "soft start")
    for i, name in enumerate(grid.columns):
        if name:
            yield _text(left + (i + 0.5) * wide, top - 6, name, "soft")
    for j, (name, cells) in enumerate(grid.rows):
        middle = top + j * _HIGH + _HIGH / 2
        if name:
            yield _text(left - 8, middle + 4, name, "soft end")
        for i, cell in enumerate(cells):
            at = left + i * wide
            yield (f'<rect x="{at + 1:g}" y="{top + j * _HIGH + 1:g}" width="{wide - 2:g}" height="{_HIGH - 2}" '
                   f'rx="3" fill="{fill(cell.colour)}"/>')
            yield _text(at + wide / 2, middle + (-2 if cell.below else 4), cell.text)
            if cell.below:
                yield _text(at + wide / 2, middle + 13, cell.below, "soft")


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{f" class={kind!r}" if kind else ""}>{escape(text)}</text>'.replace("'", '"')
